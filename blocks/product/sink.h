// A Sink takes the sums of a tile from where a product's main loop leaves them, and says what
// becomes of them. It is to a product's result what Rows (cdna/rows.h) are to its operands.
//
//   Rows ---> main loop ---> sums ---> Sink   scales, bias, perhaps an activation, one rounding,
//                                             then a store, a quantisation, rows scattered to
//                                             slots, or partial sums for another worker
//
// A main loop knows nothing of its Sink but finish(): a product that ends in another way is another
// Sink and the same loop. What a Sink goes by (the problem, the tile, LDS) its constructor takes.
//
// On AMD a Sink is made for each tile:
//
//   Sums            what the loop leaves in the registers of a lane
//   finish(sums)    all threads of the workgroup call it. LDS is the Sink's from then on: a barrier
//                   stands before, and before LDS is written again
//
// On NVIDIA's warpgroup kernel (cuda/warpgroup.cuh) it is made once, for all tiles of a warp:
//
//   finish(part, sums)       each warpgroup calls it for its part of a tile (UnitPart)
//   end()                    behind a warp's last tile: what is under way has arrived
//   Shared, init(shared)     what it needs of static shared memory, which one thread makes ready
//   warp_staging(problem)    what it needs of dynamic shared memory: bytes of each warp
//   kPlaces                  rows of out that are looked up before a tile ends; 0: none
#pragma once

#include <type_traits>
#include <utility>

namespace rocm_kernels {

namespace detail {

template <class, class Sink, class... Given>
struct Finishes : std::false_type {};
template <class Sink, class... Given>
struct Finishes<std::void_t<decltype(std::declval<Sink&>().finish(std::declval<Given>()...))>, Sink,
                Given...> : std::true_type {};

}  // namespace detail

// Whether a Sink has the finish() that a kernel will call: asserted where the two are joined.
template <class Sink, class... Given>
constexpr bool kIsSinkOf = detail::Finishes<void, Sink, Given...>::value;

}  // namespace rocm_kernels
