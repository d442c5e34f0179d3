"""Kernels of the Triton suite: such as people write, and the same with a bug planted."""

import triton
import triton.language as tl


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask) + tl.load(y + at, mask), mask)


@triton.jit
def vector_add_store_unmasked(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask) + tl.load(y + at, mask))


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * n + at, e / tl.sum(e, 0), at < n)


@triton.jit
def softmax_store_unmasked(x, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * n + at, e / tl.sum(e, 0))  # also over the next rows


@triton.jit
def layer_norm(x, weight, bias, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + row * n + at, mask, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / n
    centred = tl.where(mask, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + 1e-5)
    w, b = tl.load(weight + at, mask), tl.load(bias + at, mask)
    tl.store(out + row * n + at, (centred * scale * w + b).to(tl.float16), mask)


@triton.jit
def dropout(x, out, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > 0.5
    v = tl.load(x + at, at < n)
    tl.store(out + at, tl.where(keep, v * 2, 0.0), at < n)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        inside = begin + k < K
        u = tl.load(a + m[:, None] * K + (begin + k)[None, :],
                    (m < M)[:, None] & inside[None, :], other=0.0)  # fmt: skip
        v = tl.load(b + (begin + k)[:, None] * N + n[None, :],
                    inside[:, None] & (n < N)[None, :], other=0.0)  # fmt: skip
        sums = tl.dot(u, v, sums)
    tl.store(c + m[:, None] * N + n[None, :], sums.to(tl.float16),
             (m < M)[:, None] & (n < N)[None, :])  # fmt: skip


@triton.jit
def matmul_adds_to_c(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = (m < M)[:, None] & (n < N)[None, :]
    sums = tl.load(c + m[:, None] * N + n[None, :], inside).to(tl.float32)  # nobody wrote it
    for begin in range(0, K, BK):
        u = tl.load(a + m[:, None] * K + (begin + k)[None, :], (m < M)[:, None], other=0.0)
        v = tl.load(b + (begin + k)[:, None] * N + n[None, :], (n < N)[None, :], other=0.0)
        sums = tl.dot(u, v, sums)
    tl.store(c + m[:, None] * N + n[None, :], sums.to(tl.float16), inside)


@triton.jit
def split_k(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            ATOMIC: tl.constexpr):  # fmt: skip
    """Every program adds its part of K to c, of zeros."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    part = tl.dot(
        tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    )
    at = c + m[:, None] * N + n[None, :]
    if ATOMIC:
        tl.atomic_add(at, part, sem="relaxed")
    else:
        tl.store(at, tl.load(at) + part)


@triton.jit
def attention(q, k, v, out, scale, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Causal, a head a program of the second axis."""
    head = tl.program_id(1) * n * D
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    queries = tl.load(q + head + m[:, None] * D + d[None, :])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    for begin in range(0, (tl.program_id(0) + 1) * BM, BN):
        j = begin + tl.arange(0, BN)
        keys = tl.load(k + head + j[None, :] * D + d[:, None])
        s = tl.dot(queries, keys) * scale
        s = tl.where(m[:, None] >= j[None, :], s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        old = tl.exp(top - higher)
        total = total * old + tl.sum(p, 1)
        values = tl.load(v + head + j[:, None] * D + d[None, :])
        sums = tl.dot(p.to(tl.float16), values, sums * old[:, None])
        top = higher
    tl.store(out + head + m[:, None] * D + d[None, :], (sums / total[:, None]).to(tl.float16))


@triton.jit
def prefix_sum(x, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=0)
    tl.store(out + row * n + at, tl.cumsum(v, 0), at < n)


@triton.jit
def sort(x, out, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + at, tl.sort(tl.load(x + row * BLOCK + at)))


@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = tl.load(x + at, at < n, other=0)
    if ATOMIC:
        tl.atomic_add(out + bins, 1, at < n, sem="relaxed")
    else:
        tl.store(out + bins, tl.load(out + bins, at < n) + 1, at < n)


@triton.jit
def transpose(x, out, M, N, B: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * B + tl.arange(0, B)
    v = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(v))


@triton.jit
def cross_entropy(x, target, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=-float("inf")).to(tl.float32)
    top = tl.max(v, 0)
    total = tl.sum(tl.exp(v - top), 0)
    label = tl.load(target + row)
    tl.store(out + row, tl.log(total) + top - tl.load(x + row * n + label).to(tl.float32))


@triton.jit
def last_sums(x, parts, count, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
              SEM: tl.constexpr):  # fmt: skip
    """Each program sums a part; the one that comes last sums the parts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + at), 0))
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=SEM) == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)), 0))


@triton.jit
def all_sum(x, parts, out, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Reads the parts of programs that may not have stored them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + at), 0))
    tl.store(out + tl.program_id(0), tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)), 0))


@triton.jit
def locked_sum(x, out, lock, n, BLOCK: tl.constexpr, LOCKED: tl.constexpr, FREED: tl.constexpr,
               SEM: tl.constexpr):  # fmt: skip
    """Every program adds its row to one, under a lock."""
    at = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + at, at < n)
    if LOCKED:
        while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
            pass
    tl.store(out + at, tl.load(out + at, at < n) + v, at < n)
    tl.debug_barrier()
    if FREED:
        tl.atomic_xchg(lock, 0, sem=SEM)
