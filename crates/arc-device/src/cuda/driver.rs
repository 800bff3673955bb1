//! The CUDA driver's calls that Arc makes, and nothing else of it: one context, one stream, no event tracking.
//!
//! Calls return the driver's code; [`Cuda`](super::Cuda) counts them and names the stage.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUresult};

use super::images::{IMAGES, KERNELS, Kernel};
use crate::error::{DeviceError, Result};

/// Shape of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
    /// Blocks of a cluster along x; 0 or 1 for none.
    pub cluster: u32,
}

impl Grid {
    /// `blocks` blocks in x.
    pub const fn new(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: [blocks, 1, 1], threads, shared: 0, cluster: 0 }
    }

    /// Blocks in x and y.
    pub const fn xy(x: u32, y: u32, threads: u32) -> Grid {
        Grid { blocks: [x, y, 1], threads, shared: 0, cluster: 0 }
    }

    /// With dynamic shared memory.
    pub const fn shared(self, shared: u32) -> Grid {
        Grid { shared, ..self }
    }

    /// With clusters.
    pub const fn cluster(self, cluster: u32) -> Grid {
        Grid { cluster, ..self }
    }
}

/// An instantiated graph.
pub struct Graph {
    exec: sys::CUgraphExec,
    /// Nodes of the graph.
    pub nodes: usize,
}

/// One device with one stream.
pub struct Driver {
    context: sys::CUcontext,
    device: sys::CUdevice,
    stream: sys::CUstream,
    /// By [`Kernel`].
    functions: Vec<sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    /// Name of the card.
    pub name: String,
    /// 10 * major + minor.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Driver version as the driver counts: 1000 * major + 10 * minor.
    pub version: i32,
    /// Device memory taken and given back, in calls.
    allocs: AtomicU64,
    frees: AtomicU64,
}

/// What a failing call says.
fn failed(call: &'static str, stage: &'static str, code: CUresult) -> DeviceError {
    let mut text: *const c_char = ptr::null();
    // SAFETY: writes a pointer to a static string, or leaves it null for an unknown code.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    let message = if known {
        // SAFETY: a zero-terminated string that lives as long as the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    };
    DeviceError::Cuda { call, stage, code: code as i32, message }
}

fn check(call: &'static str, stage: &'static str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, stage, code)) }
}

fn unavailable(why: String) -> DeviceError {
    DeviceError::Unavailable { device: "cuda", why }
}

impl Driver {
    /// Opens device `ordinal` and loads every embedded image that it runs. Errors: `Unavailable` that says what is
    /// missing, `Cuda`.
    pub fn open(ordinal: usize) -> Result<Driver> {
        if IMAGES.is_empty() {
            return Err(unavailable(
                "this build has no kernels, since no nvcc was found; set CUDA_HOME or run tests/fetch_cuda.sh, then \
                 build again"
                    .to_owned(),
            ));
        }
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("the NVIDIA driver's library (libcuda.so.1) is not on this machine".to_owned()));
        }
        // SAFETY: the first call into the driver, as it wants.
        check("cuInit", "open", unsafe { sys::cuInit(0) })?;
        let (mut count, mut version) = (0, 0);
        // SAFETY: each writes one integer.
        unsafe {
            check("cuDeviceGetCount", "open", sys::cuDeviceGetCount(&mut count))?;
            check("cuDriverGetVersion", "open", sys::cuDriverGetVersion(&mut version))?;
        }
        if ordinal >= count as usize {
            return Err(unavailable(format!("device {ordinal} was asked for, the driver sees {count}")));
        }
        let mut device = 0;
        // SAFETY: writes a handle.
        check("cuDeviceGet", "open", unsafe { sys::cuDeviceGet(&mut device, ordinal as i32) })?;
        let attribute = |what| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let code = unsafe { sys::cuDeviceGetAttribute(&mut value, what, device) };
            check("cuDeviceGetAttribute", "open", code).map(|()| value as u32)
        };
        use sys::CUdevice_attribute_enum as At;
        let capability = 10 * attribute(At::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(At::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(At::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let mut name = [0 as c_char; 128];
        // SAFETY: writes at most 128 bytes, zero-terminated.
        check("cuDeviceGetName", "open", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 128, device) })?;
        // SAFETY: zero-terminated as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        if !IMAGES.iter().any(|image| image.runs_on(capability)) {
            let mut archs: Vec<&str> = IMAGES.iter().map(|image| image.arch).collect();
            archs.dedup();
            return Err(unavailable(format!(
                "{name} has compute capability {}.{}, this build has kernels for {}; build with ARC_CUDA_ARCHS set",
                capability / 10,
                capability % 10,
                archs.join(", ")
            )));
        }
        let mut context = ptr::null_mut();
        // SAFETY: writes a handle; the primary context is retained until `drop`.
        check("cuDevicePrimaryCtxRetain", "open", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        let mut driver = Driver {
            context,
            device,
            stream: ptr::null_mut(),
            functions: vec![ptr::null_mut(); KERNELS.len()],
            modules: Vec::new(),
            name,
            capability,
            multiprocessors,
            version,
            allocs: AtomicU64::new(0),
            frees: AtomicU64::new(0),
        };
        driver.make_current()?;
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; writes a handle.
        check("cuStreamCreate", "open", unsafe { sys::cuStreamCreate(&mut driver.stream, flags) })?;
        driver.load_images()?;
        Ok(driver)
    }

    fn load_images(&mut self) -> Result<()> {
        // Of several architectures that run here, the highest is loaded.
        let mut names: Vec<&str> = IMAGES.iter().map(|image| image.name).collect();
        names.dedup();
        for name in names {
            let fitting = IMAGES.iter().filter(|image| image.name == name && image.runs_on(self.capability));
            let Some(image) = fitting.max_by_key(|image| image.capability()) else { continue };
            let mut module = ptr::null_mut();
            let bytes = image.cubin.as_ptr().cast::<c_void>();
            // SAFETY: a cubin, whose header says its length.
            check("cuModuleLoadData", image.name, unsafe { sys::cuModuleLoadData(&mut module, bytes) })?;
            self.modules.push(module);
            let mut count = 0;
            // SAFETY: the module was loaded; writes one integer.
            check("cuModuleGetFunctionCount", image.name, unsafe {
                sys::cuModuleGetFunctionCount(&mut count, module)
            })?;
            let mut functions = vec![ptr::null_mut(); count as usize];
            // SAFETY: room for `count` handles.
            check("cuModuleEnumerateFunctions", image.name, unsafe {
                sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module)
            })?;
            for function in functions {
                self.register(image.name, function)?;
            }
        }
        Ok(())
    }

    fn register(&mut self, image: &'static str, function: sys::CUfunction) -> Result<()> {
        let mut text = ptr::null();
        // SAFETY: a function of a loaded module; writes a pointer to its zero-terminated name.
        check("cuFuncGetName", image, unsafe { sys::cuFuncGetName(&mut text, function) })?;
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let at =
            KERNELS.binary_search(&&*name).map_err(|_| unavailable(format!("{image} has unknown kernel {name}")))?;
        let shared = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        let mut fixed = 0;
        // SAFETY: writes one integer.
        check("cuFuncGetAttribute", image, unsafe { sys::cuFuncGetAttribute(&mut fixed, shared, function) })?;
        let most = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let mut limit = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGetAttribute", image, unsafe { sys::cuDeviceGetAttribute(&mut limit, most, self.device) })?;
        let dynamic = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let wide = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        let carveout = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: sets how much a launch may ask for, and what it prefers; nothing is launched.
        unsafe {
            check("cuFuncSetAttribute", image, sys::cuFuncSetAttribute(function, dynamic, limit - fixed))?;
            if self.capability >= 90 {
                check("cuFuncSetAttribute", image, sys::cuFuncSetAttribute(function, wide, 1))?;
            }
            // A block that needs little shared memory would leave L1 most of a multiprocessor's, and one that needs much
            // would wait until there is none of it left.
            check("cuFuncSetAttribute", image, sys::cuFuncSetAttribute(function, carveout, 100))?;
        }
        self.functions[at] = function;
        Ok(())
    }

    /// Sets a word that modules have under this name. How many have it.
    pub fn set_global(&self, name: &CStr, word: u64) -> Result<usize> {
        let mut found = 0;
        for &module in &self.modules {
            let (mut at, mut bytes) = (0, 0);
            // SAFETY: a loaded module and a zero-terminated name; writes an address and a size.
            match unsafe { sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, module, name.as_ptr()) } {
                CUresult::CUDA_ERROR_NOT_FOUND => continue,
                code => check("cuModuleGetGlobal", "open", code)?,
            }
            assert_eq!(bytes, size_of::<u64>(), "a word");
            self.copy_in(at, ptr::from_ref(&word).cast(), bytes, "open")?;
            found += 1;
        }
        self.synchronize("open").map(|()| found)
    }

    /// Makes the context current on the calling thread.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", "thread", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers. Where it fails both stay 0, which is how "unknown" is shown.
        let _ = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        (free as u64, total as u64)
    }

    /// Device memory; `None` where there is no room.
    pub fn alloc(&self, bytes: usize) -> Result<Option<u64>> {
        let mut at = 0;
        // SAFETY: writes an address.
        match unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            code => check("cuMemAlloc", "load", code).map(|()| {
                self.allocs.fetch_add(1, Ordering::Relaxed);
                Some(at)
            }),
        }
    }

    /// Returns device memory.
    ///
    /// # Safety
    /// `at` came from [`Driver::alloc`] and is freed once.
    pub unsafe fn free(&self, at: u64) {
        self.frees.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's promise. An error at this point was reported by the call that caused it.
        let _ = unsafe { sys::cuMemFree_v2(at) };
    }

    /// How often device memory was taken, and given back.
    pub fn allocations(&self) -> (u64, u64) {
        (self.allocs.load(Ordering::Relaxed), self.frees.load(Ordering::Relaxed))
    }

    /// Pinned host memory that kernels can write: host pointer and device address.
    pub fn alloc_pinned(&self, bytes: usize) -> Result<(*mut u8, u64)> {
        let (mut host, mut device) = (ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: each writes one pointer.
        unsafe {
            check("cuMemHostAlloc", "load", sys::cuMemHostAlloc(&mut host, bytes.max(1), flags))?;
            check("cuMemHostGetDevicePointer", "load", sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0))?;
            ptr::write_bytes(host.cast::<u8>(), 0, bytes);
        }
        Ok((host.cast(), device))
    }

    /// Zeroes device memory, in stream order.
    pub fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller owns the range.
        check("cuMemsetD8Async", "load", unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.stream) })
    }

    /// Copies to the device, in stream order. The source must stay as it is until the copy has run.
    pub fn copy_in(&self, to: u64, from: *const u8, bytes: usize, stage: &'static str) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        check("cuMemcpyHtoDAsync", stage, unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream) })
    }

    /// Copies from the device, in stream order.
    pub fn copy_out(&self, to: *mut u8, from: u64, bytes: usize, stage: &'static str) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        check("cuMemcpyDtoHAsync", stage, unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream) })
    }

    /// Copies within the device, in stream order.
    pub fn copy_within(&self, to: u64, from: u64, bytes: usize, stage: &'static str) -> Result<()> {
        // SAFETY: the caller owns both ranges.
        check("cuMemcpyDtoDAsync", stage, unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) })
    }

    /// Waits for everything enqueued.
    pub fn synchronize(&self, stage: &'static str) -> Result<()> {
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", stage, unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Whether everything enqueued has run.
    pub fn idle(&self) -> Result<bool> {
        // SAFETY: the stream is ours.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuStreamQuery", "poll", code).map(|()| true),
        }
    }

    /// A launch as the driver takes it. `attributes`: what it points to.
    fn config(&self, grid: Grid, overlap: bool, attributes: &mut [sys::CUlaunchAttribute; 2]) -> sys::CUlaunchConfig {
        let mut n = 0;
        if grid.cluster > 1 {
            attributes[n].id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[n].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: grid.cluster, y: 1, z: 1 };
            n += 1;
        }
        if overlap && self.capability >= 90 {
            attributes[n].id = sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[n].value.programmaticStreamSerializationAllowed = 1;
            n += 1;
        }
        sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: n as u32,
        }
    }

    /// How many clusters of a launch the device can have at once.
    pub fn resident_clusters(&self, kernel: Kernel, grid: Grid) -> Result<u32> {
        let mut attributes = [blank_attribute(), blank_attribute()];
        let config = self.config(grid, false, &mut attributes);
        let mut clusters = 0;
        // SAFETY: the function is loaded; writes one integer.
        let code =
            unsafe { sys::cuOccupancyMaxActiveClusters(&mut clusters, self.functions[usize::from(kernel.0)], &config) };
        check("cuOccupancyMaxActiveClusters", kernel.name(), code)?;
        Ok(clusters as u32)
    }

    /// Launches a kernel. `args`: pointers to the values of its parameters. `overlap`: it may start before the kernel
    /// before it ends, and waits for it by itself (programmatic dependent launch).
    pub fn launch(&self, kernel: Kernel, grid: Grid, args: &mut [*mut c_void], overlap: bool) -> Result<()> {
        let mut attributes = [blank_attribute(), blank_attribute()];
        let config = self.config(grid, overlap, &mut attributes);
        let function = self.functions[usize::from(kernel.0)];
        // SAFETY: the function is loaded; `args` point to values that live through the call, in the kernel's order by
        // the contract of the stage that launches it.
        let code = unsafe { sys::cuLaunchKernelEx(&config, function, args.as_mut_ptr(), ptr::null_mut()) };
        check("cuLaunchKernelEx", kernel.name(), code)
    }

    /// Starts recording what is enqueued, instead of running it.
    pub fn begin_capture(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not being recorded.
        check("cuStreamBeginCapture", "record", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })
    }

    /// Ends recording.
    pub fn end_capture(&self) -> Result<Graph> {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is ours; writes a handle.
        check("cuStreamEndCapture", "record", unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) })?;
        let mut nodes = 0;
        let mut exec = ptr::null_mut();
        // SAFETY: a graph that was just recorded; it is no longer needed once instantiated.
        unsafe {
            check("cuGraphGetNodes", "record", sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes))?;
            let code = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            check("cuGraphInstantiate", "record", code)?;
            check("cuGraphDestroy", "record", sys::cuGraphDestroy(graph))?;
            check("cuGraphUpload", "record", sys::cuGraphUpload(exec, self.stream))?;
        }
        Ok(Graph { exec, nodes })
    }

    /// Enqueues a recorded graph.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: instantiated from this stream's recording.
        check("cuGraphLaunch", "replay", unsafe { sys::cuGraphLaunch(graph.exec, self.stream) })
    }

    /// Milliseconds that `work` takes on the stream, by the device's own clock. Waits for its end.
    pub fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        let mut events = [ptr::null_mut(); 2];
        let mut elapsed = 0.0;
        // SAFETY: two events, made, recorded, read and destroyed here.
        unsafe {
            for event in &mut events {
                check("cuEventCreate", "timed", sys::cuEventCreate(event, 0))?;
            }
            check("cuEventRecord", "timed", sys::cuEventRecord(events[0], self.stream))?;
            work()?;
            check("cuEventRecord", "timed", sys::cuEventRecord(events[1], self.stream))?;
            self.synchronize("timed")?;
            check("cuEventElapsedTime", "timed", sys::cuEventElapsedTime_v2(&mut elapsed, events[0], events[1]))?;
            for event in events {
                check("cuEventDestroy", "timed", sys::cuEventDestroy_v2(event))?;
            }
        }
        Ok(elapsed)
    }

    /// Frees a graph.
    pub fn destroy(&self, graph: Graph) {
        // SAFETY: owned, and not enqueued again.
        let _ = unsafe { sys::cuGraphExecDestroy(graph.exec) };
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: everything made from the context is given back before it, once. An error has no one to go to.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamSynchronize(self.stream);
            for &module in &self.modules {
                let _ = sys::cuModuleUnload(module);
            }
            if !self.stream.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn blank_attribute() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    }
}

/// Returns pinned host memory.
///
/// # Safety
/// `at` came from [`Driver::alloc_pinned`], is freed once, and nothing in flight touches it.
pub unsafe fn free_pinned(at: *mut u8) {
    // SAFETY: by the caller's promise.
    let _ = unsafe { sys::cuMemFreeHost(at.cast()) };
}

// SAFETY: the driver's calls may come from any thread on which the context is current; see `Driver::make_current`.
unsafe impl Send for Driver {}
// SAFETY: as above; what changes after `open` is atomic.
unsafe impl Sync for Driver {}
