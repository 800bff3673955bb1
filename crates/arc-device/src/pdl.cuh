// Programmatic dependent launch: a kernel may start while the one before it still runs.
#pragma once

namespace arc {

// Waits until every kernel before this one has ended and what they wrote can be seen. Every thread calls it before it
// touches what another kernel wrote or may still read; weights may be loaded before it.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start as soon as there is room for it. It still waits, in its own pdl_wait, for this one's end.
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace arc
