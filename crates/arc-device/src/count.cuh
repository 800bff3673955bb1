// A number that a lambda takes as a constant.
#pragma once

#include <cstdint>

namespace arc {

template <uint32_t N>
struct Count {
    static constexpr uint32_t n = N;
};

}  // namespace arc
