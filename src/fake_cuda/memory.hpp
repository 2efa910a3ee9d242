// Memory, streams, random numbers and the guard of a CUDA device that is made of host memory.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <map>
#include <mutex>
using namespace at;
static std::mutex mu;
static thread_local DeviceIndex current = 0;
static py::object* on_event = nullptr;  // called with (kind, operation, detail)
static int num_devices = 1;             // of this process, as install() sets it
constexpr int most_devices = 16;
static Device gpu(DeviceIndex index = -1) { return {kCUDA, index < 0 ? current : index}; }
static DeviceIndex exchange(DeviceIndex index) {
    auto before = current;
    TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal ", int(index), " of ", num_devices);
    if (index >= 0) current = index;
    return before;
}

// Returns the line of Python that caused the event.
static std::string report(const char* kind, const std::string& operation, const std::string& detail = "") {
    if (!on_event || !Py_IsInitialized()) return "";
    py::gil_scoped_acquire gil;
    return py::cast<std::string>((*on_event)(kind, operation, detail));
}
static std::string describe(const Tensor& t) {
    return "(" + c10::Join(", ", t.sizes()) + ") " + std::string(t.dtype().name());
}

// ---- copies that arrive late: when the host waits for the device
struct Copy {
    Tensor host, values;
    std::string what;
};
static std::vector<Copy> pending;  // the host memory gets the values
static std::vector<Copy> sources;  // pinned memory that a copy to the device still reads: it must keep the values
void watch_reads(bool on);         // of host memory, while copies are pending

static void flush() {
    std::vector<Copy> arrived, read;
    {
        std::lock_guard<std::mutex> lock(mu);
        arrived.swap(pending);
        read.swap(sources);
    }
    if (arrived.size()) watch_reads(false);
    c10::impl::ExcludeDispatchKeyGuard no_gradients(c10::autograd_dispatch_keyset);
    for (auto& copy : read)  // first: what arrives in the same memory comes later in the stream
        if (!at::equal(copy.host.nan_to_num(), copy.values.nan_to_num())) report("RACE_H2D", "copy_", copy.what);
    for (auto& copy : arrived) copy.host.copy_(copy.values);
}
static void wait(const char* kind, const char* operation) {
    flush();
    report(kind, operation);
}
static bool is_pending(const Tensor& t) {
    if (!t.defined() || !t.device().is_cpu() || !t.has_storage() || !t.numel()) return false;
    auto bounds = [](const Tensor& of) {
        int64_t last = 1;
        for (int64_t i = 0; i < of.dim(); i++) last += (of.size(i) - 1) * of.stride(i);
        auto start = (const char*)of.const_data_ptr();
        return std::make_pair(start, start + last * of.itemsize());
    };
    auto [start, end] = bounds(t);
    std::lock_guard<std::mutex> lock(mu);
    for (auto& copy : pending) {
        auto [first, last] = bounds(copy.host);
        if (start < last && first < end) return true;
    }
    return false;
}

// ---- memory: the device's, counted and filled with NaN; and page-locked memory of the host
static std::atomic<int64_t> allocated{0}, peak{0};
static std::map<const char*, size_t> pinned;
static void pin(const void* start, size_t size) {
    std::lock_guard<std::mutex> lock(mu);
    if (size) pinned[(const char*)start] = size;
    else pinned.erase((const char*)start);
}
static bool is_pinned(const void* at) {
    std::lock_guard<std::mutex> lock(mu);
    auto after = pinned.upper_bound((const char*)at);
    return after != pinned.begin() && (--after, (const char*)at < after->first + after->second);
}
template <bool on_device>
struct Memory final : Allocator {
    struct Block {
        void* start;
        size_t size;
    };
    DataPtr allocate(size_t size) override {
        void* start = nullptr;
        if (size && posix_memalign(&start, 512, size)) throw std::bad_alloc();
        if (size) memset(start, on_device ? 0xff : 0x7f, size);
        if (!on_device) pin(start, size);
        if (on_device && (allocated += size) > peak) peak = (int64_t)allocated;
        return {start, new Block{start, size}, &release, on_device ? gpu() : Device(kCPU)};
    }
    static void release(void* context) {
        auto* block = (Block*)context;
        if (on_device) allocated -= block->size;
        if (!on_device) pin(block->start, 0);
        free(block->start);
        delete block;
    }
    void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static Memory<true> device_memory;
static Memory<false> pinned_memory;

// ---- streams, events, the current device: everything has been computed, a wait is reported
using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kCUDA; }
    Device exchangeDevice(Device d) const override { return gpu(exchange(d.index())); }
    Device getDevice() const override { return gpu(); }
    void setDevice(Device d) const override { exchange(d.index()); }
    void uncheckedSetDevice(Device d) const noexcept override { exchange(d.index()); }
    DeviceIndex deviceCount() const noexcept override { return num_devices; }
    Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, gpu(d.index())); }
    Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, gpu(d.index()), 7); }
    Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
    Stream getDefaultStream(Device d) const override { return getStream(d); }
    Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
    void record(void** event, const Stream&, DeviceIndex, EventFlag) const override {
        if (!*event) *event = new Moment;
        *(Moment*)*event = std::chrono::steady_clock::now();
    }
    void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Moment*)event; }
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return flush(), true; }
    bool queryStream(const Stream&) const override { return flush(), true; }
    void synchronizeEvent(void*) const override { wait("EVENT_WAIT", "Event.synchronize"); }
    void synchronizeStream(const Stream&) const override { wait("SYNC", "Stream.synchronize"); }
    void synchronizeDevice(DeviceIndex) const override { wait("SYNC", "torch.cuda.synchronize"); }
    void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
    double elapsedTime(void* from, void* to, DeviceIndex) const override {
        return std::chrono::duration<double, std::milli>(*(Moment*)to - *(Moment*)from).count();
    }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar register_guard(kCUDA, &guard);

// ---- random numbers
struct DeviceGenerator final : CPUGeneratorImpl {
    DeviceGenerator(DeviceIndex index) : CPUGeneratorImpl(67280421310721) { device_ = gpu(index); }
};

static const Generator& default_generator(DeviceIndex index) {
    static std::vector<Generator> all = [] {
        std::vector<Generator> made;
        for (int i = 0; i < most_devices; i++) made.push_back(make_generator<DeviceGenerator>(i));
        return made;
    }();
    return all[gpu(index).index()];
}

namespace at {
struct Hooks : CUDAHooksInterface {
    Hooks(CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }  // getAccelerator takes it for the accelerator
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    int getNumGPUs() const override { return num_devices; }
    DeviceIndex deviceCount() const override { return num_devices; }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
    DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
    Device getDeviceFromPtr(void*) const override { return gpu(); }
    bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
    Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
    const Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
    Generator getNewGenerator(DeviceIndex index) const override { return make_generator<DeviceGenerator>(index); }
    void deviceSynchronize(DeviceIndex) const override { wait("SYNC", "torch.cuda.synchronize"); }
};
}  // namespace at

// ---- one memory as a tensor of the host and of the device
static Tensor tensor_over(Storage storage, c10::DispatchKey key, const Tensor& like) {
    auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    return made;
}
static Tensor alias(const Tensor& t, Device device) {
    bool on_device = device.is_cuda();
    Allocator* allocator = on_device ? &device_memory : c10::GetCPUAllocator();
    auto* kept = new Storage(t.storage());
    DataPtr data(kept->mutable_data(), kept, +[](void* context) { delete (Storage*)context; }, device);
    Storage storage(Storage::use_byte_size_t(), kept->nbytes(), std::move(data), allocator, true);
    return tensor_over(storage, on_device ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU, t);
}
static Tensor on_host(const Tensor& t) {
    auto made = alias(t, kCPU);
    made._set_conj(t.is_conj());
    made._set_neg(t.is_neg());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
}
