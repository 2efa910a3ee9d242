// A CUDA device made of host memory: real values, device type "cuda". Operations run the CPU's kernels on aliases.
#include "memory.hpp"

static const std::set<std::string> syncs = {"aten::_local_scalar_dense",
                                            "aten::nonzero",
                                            "aten::masked_select",
                                            "aten::equal",
                                            "aten::is_nonzero",
                                            "aten::_unique2",
                                            "aten::unique_dim",
                                            "aten::unique_consecutive",
                                            "aten::_unique",
                                            "aten::nonzero_static",
                                            "aten::bincount",
                                            "aten::repeat_interleave",
                                            "aten::_histogramdd_bin_edges",
                                            "aten::item",
                                            "aten::linalg_eigh",
                                            "aten::multinomial"};
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto& schema = op.schema();
    auto n = schema.arguments().size();
    auto begin = stack->size() - n;
    std::string name = schema.name();
    std::vector<std::pair<Tensor, Tensor>> map;  // (cpu alias, original)
    std::vector<std::pair<Tensor, IntArrayRef>> outs;
    bool has_cuda = false;
    std::string cpu_args;
    std::string self_dev;
    auto conv = [&](const Tensor& t, const std::string& arg) -> Tensor {
        if (!t.defined()) return t;
        if (t.device().is_cuda()) {
            has_cuda = true;
            for (auto& p : map)
                if (rawp(p.second) == rawp(t)) return p.first;
            auto c = to_cpu_alias(t);
            map.emplace_back(c, t);
            return c;
        }
        if (!rawp(t)->is_wrapped_number() && t.device().is_cpu()) {
            std::ostringstream s;
            s << arg << t.sizes() << ":" << t.dtype().name() << " ";
            cpu_args += s.str();
        }
        return t;
    };
    bool bool_index = false, cpu_index = false;
    for (size_t i = 0; i < n; i++) {
        auto& v = (*stack)[begin + i];
        auto arg = schema.arguments()[i].name();
        if (v.isTensor())
            v = conv(v.toTensor(), arg);
        else if (v.isTensorList()) {
            std::vector<Tensor> r;
            for (const Tensor& t : v.toTensorVector()) r.push_back(conv(t, arg));
            v = c10::IValue(r);
        } else if (v.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> r;
            for (std::optional<Tensor> t : v.toOptionalTensorList()) {
                if (t && t->defined() && (t->scalar_type() == kBool || t->scalar_type() == kByte)) bool_index = true;
                if (t && t->defined() && t->device().is_cpu()) cpu_index = true;
                r.push_back(t ? std::optional<Tensor>(conv(*t, arg)) : t);
            }
            v = c10::IValue(r);
        } else if (v.isDevice()) {
            if (v.toDevice().is_cuda()) {
                has_cuda = true;
                v = c10::IValue(Device(kCPU));
            }
        } else if (v.isGenerator()) {
            if (v.toGenerator().device().is_cuda())
                v = c10::IValue(cpu_twin());
            else
                report("BAD_GENERATOR", name, "cpu generator with cuda tensor");
        }
    }
    if (has_cuda && !cpu_args.empty())
        report(cpu_index ? "CPU_INDEX" : "MIX", name + "." + schema.overload_name(), cpu_args);
    if (syncs.count(name)) {
        if (name == "aten::repeat_interleave") {
            bool given = false;
            for (size_t i = 0; i < n; i++)
                if (schema.arguments()[i].name() == "output_size" && !(*stack)[begin + i].isNone()) given = true;
            if (!given) report("SYNC", name, "");
        } else if (name != "aten::nonzero_static" && name != "aten::multinomial")
            report("SYNC", name, "");
        flush();
    }
    if (name == "aten::_grouped_mm") {
        for (auto& p : map) {
            auto& t = p.second;
            if (t.dim() < 2) continue;
            if (t.scalar_type() != kBFloat16) {
                report("SYNC", "grouped_mm not bf16: fallback reads offs", std::string(t.dtype().name()));
                break;
            }
            auto st = t.strides();
            auto sz = t.sizes();
            int e = t.dim() - 1;
            int al = 8;
            bool okk = (st[e - 1] == 1 && st[e] >= std::max<int64_t>(1, sz[e - 1])) ? st[e] % al == 0
                       : (st[e] == 1 && st[e - 1] >= std::max<int64_t>(1, sz[e]))   ? st[e - 1] % al == 0
                                                                                    : false;
            std::ostringstream d;
            d << sz << st;
            if (!okk) report("GROUPED_MM_STRIDES", name, d.str());
        }
        flush();
    }
    if (bool_index && name != "aten::_index_put_impl_") {
        report("SYNC", name + "(bool mask)", "");
        flush();
    }
    std::vector<std::vector<int64_t>> before;
    for (auto& p : map) before.push_back(p.first.sizes().vec());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (size_t k = 0; k < map.size(); k++) {  // out= that was resized
        if (map[k].first.sizes() != IntArrayRef(before[k])) {
            auto w = to_cuda_wrap(map[k].first);
            map[k].second.unsafeGetTensorImpl()->set_storage_keep_dtype(w.storage());
            rawp(map[k].second)->set_storage_offset(w.storage_offset());
            rawp(map[k].second)->set_sizes_and_strides(w.sizes(), w.strides());
        }
    }
    auto back = [&](const Tensor& t) -> Tensor {
        if (!t.defined() || !t.device().is_cpu()) return t;
        for (auto& p : map)
            if (rawp(p.first) == rawp(t)) return p.second;
        if (!has_cuda) return t;
        for (auto& p : map)
            if (p.first.has_storage() && t.storage().is_alias_of(p.first.storage())) {
                auto out = at::detail::make_tensor<c10::TensorImpl>(
                    c10::Storage(p.second.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
                rawp(out)->set_storage_offset(t.storage_offset());
                rawp(out)->set_sizes_and_strides(t.sizes(), t.strides());
                return out;
            }
        return to_cuda_wrap(t);
    };
    auto nr = schema.returns().size();
    auto rb = stack->size() - nr;
    for (size_t i = 0; i < nr; i++) {
        auto& v = (*stack)[rb + i];
        if (v.isTensor())
            v = back(v.toTensor());
        else if (v.isTensorList()) {
            std::vector<Tensor> r;
            for (const Tensor& t : v.toTensorVector()) r.push_back(back(t));
            v = c10::IValue(r);
        }
    }
}
static Tensor f_empty(IntArrayRef size, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device> d,
                      std::optional<bool>, std::optional<MemoryFormat> mf) {
    auto o = cur;
    if (d && d->has_index()) cur = d->index();
    auto t =
        at::detail::empty_generic(size, &alloc, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype_or_default(dt), mf);
    cur = o;
    return t;
}
static Tensor f_empty_strided(IntArrayRef size, IntArrayRef st, std::optional<ScalarType> dt, std::optional<Layout>,
                              std::optional<Device> d, std::optional<bool>) {
    auto o = cur;
    if (d && d->has_index()) cur = d->index();
    auto t = at::detail::empty_strided_generic(size, st, &alloc, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                               dtype_or_default(dt));
    cur = o;
    return t;
}
static Tensor& f_copy_(Tensor& self, const Tensor& src, bool nb) {
    auto a = self.device().is_cuda() ? to_cpu_alias(self) : self;
    auto b = src.device().is_cuda() ? to_cpu_alias(src) : src;
    c10::impl::ExcludeDispatchKeyGuard g(c10::autograd_dispatch_keyset);
    std::ostringstream s;
    s << src.sizes() << ":" << src.dtype().name() << (nb ? " non_blocking" : "");
    if (self.device().is_cuda() && src.device().is_cpu()) {
        if (!nb) {
            report("SYNC", "H2D blocking copy", s.str());
            flush();
            a.copy_(b);
        } else if (is_pinned(src.storage().data())) {
            a.copy_(b);
            std::lock_guard<std::recursive_mutex> l(mu);
            sources.push_back({src, src.clone(), s.str()});
        } else {
            report("H2D_PAGEABLE", "H2D from pageable memory", s.str());
            a.copy_(b);
        }
    } else if (self.device().is_cpu() && src.device().is_cuda()) {
        if (nb && is_pinned(self.storage().data())) {
            std::lock_guard<std::recursive_mutex> l(mu);
            pending.push_back({self, b.clone()});
            report("D2H_ASYNC", "copy_", s.str());
        } else if (nb) {
            report("SYNC", "D2H non_blocking to PAGEABLE memory", s.str());
            std::lock_guard<std::recursive_mutex> l(mu);
            pending.push_back({self, b.clone()});
        } else {
            report("SYNC", "D2H blocking copy", s.str());
            flush();
            a.copy_(b);
        }
    } else
        a.copy_(b);
    return self;
}
static const Tensor& f_resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
    int64_t need = 1;
    for (auto s : size) need *= s;
    need = (need + self.storage_offset()) * self.dtype().itemsize();
    if ((int64_t)self.storage().nbytes() < need) {
        auto fresh = alloc.allocate(need);
        if (self.storage().nbytes()) memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
        self.storage().set_data_ptr_noswap(std::move(fresh));
        self.storage().set_nbytes(need);
    }
    rawp(self)->set_sizes_contiguous(size);
    return self;
}
static void resize_storage(const Tensor& t, int64_t n) {
    auto s = t.storage();
    auto fresh = alloc.allocate(n);
    auto k = std::min<int64_t>(n, s.nbytes());
    if (k) memcpy(fresh.get(), s.data(), k);
    s.set_data_ptr_noswap(std::move(fresh));
    s.set_nbytes(n);
}
static Tensor& f_set_(Tensor& self, Storage s, int64_t off, IntArrayRef size, IntArrayRef st) {
    rawp(self)->set_storage_keep_dtype(std::move(s));
    rawp(self)->set_storage_offset(off);
    std::vector<int64_t> str = st.vec();
    if (st.size() != size.size()) {
        str.assign(size.size(), 1);
        for (int i = (int)size.size() - 2; i >= 0; i--) str[i] = str[i + 1] * std::max<int64_t>(size[i + 1], 1);
    }
    rawp(self)->set_sizes_and_strides(size, str);
    return self;
}
static Tensor& f_set_t(Tensor& self, const Tensor& src) {
    return f_set_(self, src.storage(), src.storage_offset(), src.sizes(), src.strides());
}
static Tensor& f_set_s(Tensor& self, Storage s) {
    int64_t n = s.nbytes() / self.dtype().itemsize();
    return f_set_(self, std::move(s), 0, {n}, {});
}
static Tensor& f_set_0(Tensor& self) {
    auto t = f_empty({0}, self.scalar_type(), {}, self.device(), {}, {});
    return f_set_t(self, t);
}
static void f_record_stream(Tensor&, Stream) {}
static Tensor f_view(const Tensor& t, IntArrayRef s) { return at::native::view(t, s); }
static Tensor f_as_strided(const Tensor& t, IntArrayRef s, IntArrayRef st, std::optional<int64_t> o) {
    return at::native::as_strided_tensorimpl(t, s, st, o);
}
static Tensor f_ra(const Tensor& t, IntArrayRef s, IntArrayRef st) { return at::native::_reshape_alias(t, s, st); }
static Tensor f_unfold(const Tensor& t, int64_t d, int64_t s, int64_t st) { return at::native::unfold(t, d, s, st); }
static Tensor f_histc(const Tensor& t, int64_t bins, const Scalar& lo, const Scalar& hi) {
    auto c = to_cpu_alias(t);
    auto r = at::histc(c.to(kFloat), bins, lo, hi).to(c.scalar_type());
    return to_cuda_wrap(r);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", f_empty);
    m.impl("empty_strided", f_empty_strided);
    m.impl("copy_", f_copy_);
    m.impl("resize_", f_resize_);
    m.impl("set_.source_Storage_storage_offset", f_set_);
    m.impl("set_.source_Tensor", f_set_t);
    m.impl("set_.source_Storage", f_set_s);
    m.impl("set_", f_set_0);
    m.impl("histc", f_histc);
    m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
    m.impl("record_stream", f_record_stream);
    m.impl("view", f_view);
    m.impl("as_strided", f_as_strided);
    m.impl("_reshape_alias", f_ra);
    m.impl("unfold", f_unfold);
}
#include <dlfcn.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    {
        auto p = (const void**)dlsym(RTLD_DEFAULT, "fake_cuda_hooks");
        if (!p) throw std::runtime_error("LD_PRELOAD preload.so");
        static at::FakeHooks hooks{at::CUDAHooksArgs{}};
        *p = (const void*)static_cast<const at::CUDAHooksInterface*>(&hooks);
    }
    m.def("set_callback", [](py::object f) { on_event = new py::object(f); });
    m.def("flush", [] {
        py::gil_scoped_release r;
        flush();
    });
    m.def("get_device", [] { return (int)cur; });
    m.def("set_device", [](int d) { cur = d; });
    m.def("cpu_alias", [](const Tensor& t) { return to_cpu_alias(t); });
    m.def("allocated", [] { return (int64_t)allocated; });
    m.def("peak", [] { return (int64_t)peak; });
    m.def("reset_peak", [] { peak = (int64_t)allocated; });
    m.def("pin", [](uintptr_t p, size_t n) {
        std::lock_guard<std::recursive_mutex> l(mu);
        pinned[(char*)p] = n;
    });
    m.def("unpin", [](uintptr_t p) {
        std::lock_guard<std::recursive_mutex> l(mu);
        pinned.erase((char*)p);
    });
    m.def("default_gen", [](int i) { return default_gen(i); });
    m.def("twin_seed", [](uint64_t s) { cpu_twin().set_current_seed(s); });
    m.def("resize_storage", [](const Tensor& t, int64_t n) { resize_storage(t, n); });
}
