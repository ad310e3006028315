// Replaces CUTLASS's <cutlass/arch/grid_dependency_control.h>: griddepcontrol.
#pragma once

#include <sim/runtime_sm90.h>

namespace cutlass::arch {

inline void launch_dependent_grids() { sim::grid_dependency_launch(); }
inline void wait_on_dependent_grids() { sim::grid_dependency_wait(); }

inline constexpr bool IsGdcGloballyEnabled = true;

}  // namespace cutlass::arch
