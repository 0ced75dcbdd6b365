// Python's view: addresses as integers, no array types. The caller checks what it passes; see
// civetta/ngram/native_reader.py and _reader.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <string>

#include "reader.hpp"

namespace nb = nanobind;
using namespace civetta;

namespace {

// After a fork the child has the memory of the threads but not the threads: whatever they might
// hold is left alone there, destructors included.
template <typename T>
class Owned {
   public:
    explicit Owned(std::shared_ptr<T> what) : what_(std::move(what)), pid_(getpid()) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
        if (forked()) new std::shared_ptr<T>(std::move(what_));
    }
    bool forked() const { return getpid() != pid_; }
    T& get() const {
        if (forked()) throw std::runtime_error("opened before this process was forked");
        return *what_;
    }
    const std::shared_ptr<T>& share() const { return what_; }

   private:
    std::shared_ptr<T> what_;
    pid_t pid_;
};

using JobHandle = Owned<Job>;
using ReaderHandle = Owned<Reader>;

const char* state_name(State state) {
    switch (state) {
        case State::running: return "running";
        case State::done: return "done";
        case State::failed: return "failed";
        case State::cancelled: return "cancelled";
    }
    return "failed";
}

template <typename T>
const T* array(uintptr_t address) {
    return reinterpret_cast<const T*>(address);
}

JobHandle* submit(const ReaderHandle& reader, uintptr_t files, uintptr_t offsets, uintptr_t sizes, uintptr_t outs,
                  int64_t count, int64_t out_bytes) {
    const nb::gil_scoped_release released;
    Reader& target = reader.get();
    std::vector<Piece> pieces(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        pieces[static_cast<size_t>(i)] = {array<int64_t>(offsets)[i], array<int64_t>(outs)[i],
                                          array<int32_t>(files)[i], array<int32_t>(sizes)[i]};
    }
    auto job = std::make_shared<Job>(std::move(pieces), static_cast<size_t>(out_bytes));
    if (!job->over()) target.submit(job);
    return new JobHandle(std::move(job));
}

ReaderHandle* open_reader(const std::string& kind, std::vector<int> files, int depth, int64_t largest) {
    const int64_t buffer = std::max(MERGE_BYTES, (largest + 2 * PAGE - 1) / PAGE * PAGE);
    std::unique_ptr<Reader> made = kind == "uring" ? make_ring(std::move(files), depth, buffer)
                                                   : make_pool(std::move(files), depth, buffer);
    return new ReaderHandle(std::shared_ptr<Reader>(std::move(made)));
}

nb::dict stats(const ReaderHandle& reader) {
    const Counters& c = reader.get().counters();
    nb::dict out;
    out["threads"] = c.threads.load();
    out["wakes"] = c.wakes.load();
    out["reads"] = c.reads.load();
    out["bytes"] = c.bytes.load();
    out["retries"] = c.retries.load();
    out["died"] = c.died.load();
    return out;
}

}  // namespace

NB_MODULE(_reader, m) {
    nb::set_leak_warnings(false);  // a store that lives until the process ends is no leak
    m.def("uring_allowed", &ring_allowed);
    m.def("jobs_alive", &Job::alive);
    nb::class_<JobHandle>(m, "Job")
        .def("wait", [](const JobHandle& j, int64_t ms) { return j.get().wait(ms); }, nb::arg("timeout_ms"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("cancel", [](const JobHandle& j) { j.get().cancel(); })
        .def_prop_ro("state", [](const JobHandle& j) { return state_name(j.get().state()); })
        .def_prop_ro("left", [](const JobHandle& j) { return j.get().left(); })
        .def_prop_ro("extents", [](const JobHandle& j) { return j.get().extents().size(); })
        .def_prop_ro("address", [](const JobHandle& j) { return reinterpret_cast<uintptr_t>(j.get().out()); })
        .def_prop_ro("nbytes", [](const JobHandle& j) { return j.get().out_bytes(); })
        .def_prop_ro("failure", [](const JobHandle& j) {
            const Failure f = j.get().failure();
            return nb::make_tuple(f.code, f.file, f.offset);
        });
    nb::class_<ReaderHandle>(m, "Reader")
        .def("submit", &submit)
        .def("inject",
             [](const ReaderHandle& r, int error, int64_t short_bytes, int64_t delay_us, bool die, int64_t after,
                int64_t count) { r.get().inject({error, short_bytes, delay_us, die, after, count}); })
        .def("stats", &stats)
        .def("close",
             [](const ReaderHandle& r) {
                 if (!r.forked()) r.get().close();
             },
             nb::call_guard<nb::gil_scoped_release>());
    m.def("open_reader", &open_reader, nb::rv_policy::take_ownership);
}
