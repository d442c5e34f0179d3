// Data movement between lanes: readlane, permlane swaps, DPP and SDWA forms.
#include "operands.h"

namespace sim {
namespace {

int firstActive(u64 exec) { return exec ? __builtin_ctzll(exec) : 0; }

void readFirstLane(Wave& w, const Inst& i) {
  // With no lane on, lane 0 is read.
  w.s[i.dst.index] = i.src[0].is(Kind::Vgpr) ? w.row(i.src[0].index)[firstActive(w.exec())]
                                             : scalar32(w, i.src[0]);
}
void readLane(Wave& w, const Inst& i) {
  w.s[i.dst.index] = w.row(i.src[0].index)[scalar32(w, i.src[1]) & 63];
}
void writeLane(Wave& w, const Inst& i) {
  w.row(i.dst.index)[scalar32(w, i.src[1]) & 63] = scalar32(w, i.src[0]);
}

// gfx950: rows of 16 (or halves of 32) lanes change places between two registers.
template <int Width>
void permlaneSwap(Wave& w, const Inst& i) {
  u32 *a = w.row(i.dst.index), *b = w.row(i.src[0].index);
  for (int l = 0; l < kLanes; ++l) {
    if (l / Width % 2 == 0 && (w.exec() >> (l + Width) & 1) && (w.exec() >> l & 1)) {
      std::swap(a[l + Width], b[l]);
    }
  }
}

// Source lane of a DPP form, or -1 where it falls outside.
int dppSource(const Inst& i, int l) {
  int row = l & ~15, n = l & 15, amount = i.dppArg;
  switch (i.dpp) {
    case DppKind::QuadPerm:
      return (l & ~3) + i.quad[l & 3];
    case DppKind::RowShl:
      return n + amount < 16 ? l + amount : -1;
    case DppKind::RowShr:
      return n >= amount ? l - amount : -1;
    case DppKind::RowRor:
      return row + ((n - amount) & 15);
    case DppKind::WaveShl:
      return l < 63 ? l + 1 : -1;
    case DppKind::WaveShr:
      return l > 0 ? l - 1 : -1;
    case DppKind::WaveRol:
      return (l + 1) & 63;
    case DppKind::WaveRor:
      return (l - 1) & 63;
    case DppKind::Mirror:
      return row + 15 - n;
    case DppKind::HalfMirror:
      return (l & ~7) + 7 - (l & 7);
    case DppKind::Bcast15:
      return l >= 16 ? row - 1 : -1;
    case DppKind::Bcast31:
      return l >= 32 ? 31 : -1;
    case DppKind::NewBcast:
      return row + amount;
    default:
      return l;
  }
}

u32 select(u32 x, u8 sel, bool sext) {
  if (sel < 4) {
    u32 byte = x >> (8 * sel) & 255;
    return sext ? static_cast<u32>(static_cast<i32>(static_cast<i8>(byte))) : byte;
  }
  if (sel < 6) {
    u32 half = x >> (16 * (sel - 4)) & 0xffff;
    return sext ? static_cast<u32>(static_cast<i32>(static_cast<i16>(half))) : half;
  }
  return x;
}

}  // namespace

// The first source is read through a lane permutation. Lanes whose source is off or outside keep
// the destination, or read 0 with bound_ctrl; lanes that a mask turns off keep it.
void executeDpp(Wave& w, const Inst& i) {
  u64 exec = w.exec(), enabled = 0;
  u32 words = i.inner->src[0].dwords;
  for (u32 d = 0; d < words; ++d) {
    const u32* source = w.row(i.src[0].index + d);
    u32* temp = w.row(kTempBase + d);
    u32 permuted[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      int from = dppSource(i, l);
      bool valid = from >= 0 && (exec >> from & 1);
      // Row broadcasts move data to the following rows only; the first row keeps its value.
      permuted[l] = valid ? source[from] : 0;
      bool masked = !(i.rowMask >> (l / 16) & 1) || !(i.bankMask >> (l / 4 % 4) & 1);
      if (!masked && (valid || i.boundCtrl)) enabled |= 1ull << l;
    }
    std::memcpy(temp, permuted, sizeof permuted);
  }
  w.exec() = exec & enabled;
  u64 before = i.dst2.is(Kind::Sgpr) ? w.pair(i.dst2.index) : 0;
  i.inner->fn(w, *i.inner);
  if (i.dst2.is(Kind::Sgpr)) w.pair(i.dst2.index) |= before & exec & ~enabled;
  w.exec() = exec;
}

// Sources are bytes or halves; the result goes to a byte or half of the destination.
void executeSdwa(Wave& w, const Inst& i) {
  const Inst& plain = *i.inner;
  for (int n = 0; n < 2 && n < i.nsrc; ++n) {
    if (!plain.src[n].is(Kind::Vgpr) || plain.src[n].index != kTempBase + n) continue;
    Row tmp;
    const u32* s = fetch(w, i.src[n], tmp);
    u32* temp = w.row(kTempBase + n);
    u8 sel = n == 0 ? i.src0Sel : i.src1Sel;
    for (int l = 0; l < kLanes; ++l) temp[l] = select(s[l], sel, i.src[n].sext);
  }
  bool redirect = plain.dst.is(Kind::Vgpr) && plain.dst.index == kTempBase + 2;
  if (redirect) std::memcpy(w.row(kTempBase + 2), w.row(i.dst.index), kLanes * 4);
  plain.fn(w, plain);
  if (!redirect) return;
  const u32* result = w.row(kTempBase + 2);
  const u32* old = w.row(i.dst.index);
  u32 width = i.dstSel < 4 ? 8 : 16, shift = i.dstSel < 4 ? 8 * i.dstSel : 16 * (i.dstSel - 4);
  u32 field = i.dstSel == 6 ? ~0u : ((1u << width) - 1) << shift;
  Row r;
  for (int l = 0; l < kLanes; ++l) {
    u32 value = i.dstSel == 6 ? result[l] : result[l] << shift & field;
    u32 rest = 0;
    if (i.dstUnused == 1) {  // sign extension above the field
      bool negative = i.dstSel != 6 && (value >> (shift + width - 1) & 1);
      u32 above = shift + width >= 32 ? 0 : ~0u << (shift + width);
      rest = negative ? above : 0;
    } else if (i.dstUnused == 2) {
      rest = old[l] & ~field;
    }
    r.x[l] = value | rest;
  }
  writeRow(w, i.dst, r.x);
}

void registerLane(OpTable& t) {
  auto add = [&](const char* n, Handler h) { t[n] = {h, Class::Valu}; };
  add("v_readfirstlane_b32", readFirstLane);
  add("v_readlane_b32", readLane);
  add("v_writelane_b32", writeLane);
  add("v_permlane16_swap_b32", permlaneSwap<16>);
  add("v_permlane32_swap_b32", permlaneSwap<32>);
}

}  // namespace sim
