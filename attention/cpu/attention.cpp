// Attention on the CPU: tasks of some rows and all keys that they see (task.h), whose splits are
// work of their own where their states fit the workspace. Whoever has time takes the next one. The
// arithmetic is in attention_body.h.
#include "../attention.h"

#include <atomic>

#include "../../common/core/fp8.h"
#include "../../common/core/half.h"
#include "../../common/core/math.h"
#include "../../common/cpu/config.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"
#include "task.h"

#define ROCM_KERNELS_CPU_BODY "../../attention/cpu/attention_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace {

using cpu::AttentionState;
using cpu::AttentionTask;

// States of splits: more than this is not kept, since there is work enough without.
constexpr int64_t kMaxStateFloats = int64_t{1} << 24;

// The tasks of some rows for all KV heads. Their units of work, one for each split and head, have
// the heads of a split side by side: keys of all heads share the memory's pages.
struct Listed {
  AttentionTask task;   // of KV head 0
  int64_t first_unit;   // among the units of all
  int64_t first_float;  // of its states, [head, split]
};

int64_t rows_of_group(const AttentionArgs& args) { return args.heads / args.kv_heads; }

// No more entries than these: a sequence's last block of rows may not be whole.
int64_t most_listed(const AttentionArgs& args) {
  return args.total_q * rows_of_group(args) / cpu::task_rows(args) + args.batch;
}

int64_t most_state_floats(const AttentionArgs& args) {
  const int64_t rows = args.total_q * args.heads;
  const int64_t floats =
      ceil_div(args.max_seqlen_k, cpu::kSplitKeys) * AttentionState::floats(1, args.head_dim_v);
  return rows > kMaxStateFloats / (floats > 0 ? floats : 1) ? kMaxStateFloats : rows * floats;
}

int64_t list_bytes(const AttentionArgs& args) {
  return ceil_div(most_listed(args) * static_cast<int64_t>(sizeof(Listed)), 64) * 64;
}

// The tasks of a sequence's rows [row, row + rows), of the keys that they see.
AttentionTask task_of(const AttentionArgs& args, int64_t b) {
  AttentionTask task{};
  task.sequence = b;
  task.q_count = args.max_seqlen_q;
  if (args.cu_seqlens_q != nullptr) {
    task.q_begin = args.cu_seqlens_q[b];
    task.q_count = args.cu_seqlens_q[b + 1] - task.q_begin;
  }
  task.k_count = args.max_seqlen_k;
  if (args.cu_seqlens_k != nullptr) {
    task.k_begin = args.cu_seqlens_k[b];
    task.k_count = args.cu_seqlens_k[b + 1] - task.k_begin;
  }
  if (args.seqused_k != nullptr && args.seqused_k[b] < task.k_count) {
    task.k_count = args.seqused_k[b];
  }
  return task;
}

void see_keys(const AttentionArgs& args, AttentionTask& task) {
  const int64_t group = rows_of_group(args), offset = task.k_count - task.q_count;
  const int64_t first = task.row / group + offset;
  const int64_t last = (task.row + task.rows - 1) / group + offset;
  task.first_key = 0;
  task.last_key = task.k_count;
  if (args.leftpad_k != nullptr && args.leftpad_k[task.sequence] > 0) {
    task.first_key = args.leftpad_k[task.sequence];
  }
  if (args.window_left >= 0 && first - args.window_left > task.first_key) {
    task.first_key = first - args.window_left;
  }
  if (args.window_right >= 0 && last + args.window_right + 1 < task.last_key) {
    task.last_key = last + args.window_right + 1;
  }
  if (task.last_key < task.first_key) task.last_key = task.first_key;
}

// Whether rows that cu_seqlens gave, if it did, are among `total`.
bool is_inside(int64_t begin, int64_t count, const int32_t* cu_seqlens, int64_t total) {
  return cu_seqlens == nullptr || (begin >= 0 && count >= 0 && begin + count <= total);
}

// Whether the pages of the keys that a task's rows may see are k's.
bool has_pages(const AttentionArgs& args, const AttentionTask& task) {
  if (args.block_table == nullptr || task.last_key == task.first_key) return true;
  const int32_t* const pages = args.block_table + task.sequence * args.block_table_stride;
  for (int64_t i = task.first_key / args.page_size; i * args.page_size < task.last_key; ++i) {
    if (pages[i] < 0 || pages[i] >= args.pages) return false;
  }
  return true;
}

// All tasks, a sequence's last rows first, since they may see most: `count` of them.
Status list_tasks(const AttentionArgs& args, Listed* list, int64_t& count, int64_t& units,
                  int64_t& floats) {
  const int64_t block = cpu::task_rows(args), group = rows_of_group(args);
  count = units = floats = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    AttentionTask task = task_of(args, b);
    const int64_t rows = task.q_count > 0 ? task.q_count * group : 0;
    const int64_t blocks = ceil_div(rows, block);
    if (!is_inside(task.q_begin, task.q_count, args.cu_seqlens_q, args.total_q) ||
        !is_inside(task.k_begin, task.k_count, args.cu_seqlens_k, args.total_k) ||
        count + blocks > most_listed(args)) {
      return "cu_seqlens_q and cu_seqlens_k must ascend from 0 to the rows of q and k at most";
    }
    for (int64_t i = blocks - 1; i >= 0; --i) {
      task.row = i * block;
      task.rows = rows - task.row < block ? rows - task.row : block;
      see_keys(args, task);
      if (!has_pages(args, task)) {
        return "block_table must name pages that k and v have for all keys that queries see";
      }
      const int64_t splits = task.splits();
      list[count++] = {task, units, floats};
      units += (splits > 1 ? splits : 1) * args.kv_heads;
      if (splits > 1) {
        floats += splits * args.kv_heads * AttentionState::floats(task.rows, args.head_dim_v);
      }
    }
  }
  return nullptr;
}

// The last entry whose first unit is at most `unit`.
const Listed& find_unit(const Listed* list, int64_t count, int64_t unit) {
  int64_t begin = 0, end = count;
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    (list[middle].first_unit <= unit ? begin : end) = middle;
  }
  return list[begin];
}

// work(begin, end) for all of [0, count), by whichever thread has time, several up to `together` at
// once where there are enough.
template <class Work>
void take_turns(const Context& context, int64_t count, int64_t grain, int64_t together,
                const Work& work) {
  std::atomic<int64_t> next{0};
  cpu::parallel_for(context, count, grain, [&](int64_t share_begin, int64_t share_end) {
    constexpr int64_t kTurns = 4;  // that a thread takes, at least
    int64_t step = (share_end - share_begin) / kTurns;
    step = step < 1 ? 1 : step > together ? together : step;
    for (int64_t i = next.fetch_add(step); i < count; i = next.fetch_add(step)) {
      work(i, i + step < count ? i + step : count);
    }
  });
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionArgs& args, const Context&) {
  return list_bytes(args) + most_state_floats(args) * static_cast<int64_t>(sizeof(float));
}

bool rotates_new_tokens(const AttentionArgs&, const Context&) { return false; }

Status visit_attention_configs(const AttentionArgs& args, const Context&,
                               void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = cpu::check_config(args.config, false)) return error;
  visit(cpu::config_name(false), state);
  return nullptr;
}

Status launch_attention(const AttentionArgs& args, const Context& context) {
  if (const Status error = cpu::check_config(args.config, false)) return error;
  if (args.batch == 0 || args.total_q == 0 || args.heads == 0) return nullptr;
  Listed* const list = static_cast<Listed*>(args.workspace);
  float* const states =
      reinterpret_cast<float*>(static_cast<char*>(args.workspace) + list_bytes(args));
  int64_t count, units, floats;
  const int64_t heads = args.kv_heads;
  if (const Status error = list_tasks(args, list, count, units, floats)) return error;
  if (count == 0) return nullptr;
  const auto attend = ROCM_KERNELS_CPU_SELECT(attend_task);
  const auto join = ROCM_KERNELS_CPU_SELECT(join_task);
  if (floats > most_state_floats(args)) {
    take_turns(context, count * heads, 1, 1, [&](int64_t i, int64_t) {
      AttentionTask task = list[i / heads].task;
      task.kv_head = i % heads;
      attend(args, task, 1, task.first_split(), task.first_split() + task.splits(), nullptr);
    });
    return nullptr;
  }

  // Units worth a thread of their own: below, waking it costs more than it saves.
  const int64_t keys = args.max_seqlen_k < cpu::kSplitKeys ? args.max_seqlen_k : cpu::kSplitKeys;
  constexpr int64_t kElementsPerThread = 16384;
  const int64_t grain = kElementsPerThread / (keys * (args.head_dim + args.head_dim_v) + 1) + 1;
  // Heads whose rows lie side by side are read together, as many as a task has rows for.
  const bool beside =
      args.k.head_stride < args.k.row_stride && args.v.head_stride < args.v.row_stride;
  take_turns(context, units, grain, heads, [&](int64_t unit, int64_t end) {
    while (unit < end) {
      const Listed& in = find_unit(list, count, unit);
      AttentionTask task = in.task;
      task.kv_head = (unit - in.first_unit) % heads;
      const int64_t splits = task.splits(), first = task.first_split();
      if (splits <= 1) {
        attend(args, task, 1, first, first + splits, nullptr);
        ++unit;
        continue;
      }
      const int64_t split = (unit - in.first_unit) / heads;
      const int64_t floats = AttentionState::floats(task.rows, args.head_dim_v);
      AttentionState results[cpu::kMaxTaskRows];
      int64_t taken = 0;
      do {
        const int64_t head = task.kv_head + taken;
        results[taken++] = AttentionState::at(
            states + in.first_float + (head * splits + split) * floats, task.rows);
      } while (beside && unit + taken < end && task.kv_head + taken < heads &&
               (taken + 1) * task.rows <= cpu::task_rows(args));
      attend(args, task, taken, first + split, first + split + 1, results);
      unit += taken;
    }
  });
  if (floats == 0) return nullptr;
  take_turns(context, count * heads, 8, 1, [&](int64_t i, int64_t) {
    AttentionTask task = list[i / heads].task;
    task.kv_head = i % heads;
    const int64_t splits = task.splits();
    if (splits <= 1) return;
    join(args, task,
         states + list[i / heads].first_float +
             task.kv_head * splits * AttentionState::floats(task.rows, args.head_dim_v));
  });
  return nullptr;
}

}  // namespace rocm_kernels
