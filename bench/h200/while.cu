// A recorded step that runs n times: launched ahead, one graph behind the other, and as the body of a WHILE node that its last
// kernel goes on with or ends. What the second costs more is why the engine launches ahead.
//
//     nvcc -std=c++17 -O3 -rdc=true -arch=sm_90a while.cu -lcudadevrt -o while && ./while
//
// One H200, driver 580.159.04; us a step, median of 7 times 300 steps:
//
//     kernels of a step        launched ahead    WHILE node
//     185 that do nothing              149.40        152.02
//     185 of 3 us                      694.93        697.46
//     522 that do nothing              418.15        420.03
//     522 of 3 us                     1958.18       1960.29
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(x)                                                                     \
    do {                                                                             \
        const cudaError_t error = (x);                                               \
        if (error != cudaSuccess) {                                                  \
            std::fprintf(stderr, "%s: %s\n", #x, cudaGetErrorString(error));         \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

// Takes `us`, by the clock, once the kernel before it has ended.
__global__ void work(float* x, int us) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < us * 1000);
    if (threadIdx.x == 0) x[blockIdx.x] += 1;
}

// The last kernel of a step: counts down.
__global__ void count(int* left) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    --*left;
}
__global__ void again(int* left, cudaGraphConditionalHandle handle) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    cudaGraphSetConditional(handle, --*left > 0);
}

template <typename Kernel, typename... Args>
void launch(cudaStream_t stream, Kernel kernel, int blocks, int threads, Args... args) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = threads, config.stream = stream;
    config.attrs = &overlap, config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

int main() {
    constexpr int kSteps = 300, kTimes = 7;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    float* x;
    int* left;
    CHECK(cudaMalloc(&x, 4096));
    CHECK(cudaMalloc(&left, sizeof(int)));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (const int kernels : {185, 522}) {
        for (const int us : {0, 3}) {
            cudaGraph_t step, loop;
            cudaGraphExec_t step_exec, loop_exec;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < kernels; ++i) launch(stream, work, 132, 128, x, us);
            launch(stream, count, 1, 1, left);
            CHECK(cudaStreamEndCapture(stream, &step));
            CHECK(cudaGraphInstantiate(&step_exec, step, 0));

            CHECK(cudaGraphCreate(&loop, 0));
            cudaGraphConditionalHandle handle;
            CHECK(cudaGraphConditionalHandleCreate(&handle, loop, 1, cudaGraphCondAssignDefault));
            cudaGraphNodeParams params{};
            params.type = cudaGraphNodeTypeConditional;
            params.conditional.handle = handle;
            params.conditional.type = cudaGraphCondTypeWhile;
            params.conditional.size = 1;
            cudaGraphNode_t node;
            CHECK(cudaGraphAddNode(&node, loop, nullptr, nullptr, 0, &params));
            CHECK(cudaStreamBeginCaptureToGraph(stream, params.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                                cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < kernels; ++i) launch(stream, work, 132, 128, x, us);
            launch(stream, again, 1, 1, left, handle);
            CHECK(cudaStreamEndCapture(stream, nullptr));
            CHECK(cudaGraphInstantiate(&loop_exec, loop, 0));

            // Microseconds a step; both ways in turn.
            auto time = [&](auto run) {
                int n = kSteps;
                CHECK(cudaMemcpy(left, &n, sizeof(n), cudaMemcpyHostToDevice));
                CHECK(cudaEventRecord(begin, stream));
                run();
                CHECK(cudaEventRecord(end, stream));
                CHECK(cudaStreamSynchronize(stream));
                CHECK(cudaMemcpy(&n, left, sizeof(n), cudaMemcpyDeviceToHost));
                if (n != 0) std::fprintf(stderr, "%d steps are left\n", n);
                float ms;
                CHECK(cudaEventElapsedTime(&ms, begin, end));
                return 1000 * ms / kSteps;
            };
            std::vector<float> ahead, in_loop;
            for (int i = 0; i < kTimes; ++i) {
                ahead.push_back(time([&] { for (int s = 0; s < kSteps; ++s) CHECK(cudaGraphLaunch(step_exec, stream)); }));
                in_loop.push_back(time([&] { CHECK(cudaGraphLaunch(loop_exec, stream)); }));
            }
            std::sort(ahead.begin(), ahead.end());
            std::sort(in_loop.begin(), in_loop.end());
            std::printf("%d kernels of %d us: %.2f us a step launched ahead, %.2f us in a WHILE node\n", kernels, us,
                        ahead[kTimes / 2], in_loop[kTimes / 2]);
        }
    }
}
