#include "reader.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <new>

namespace civetta {

namespace {
constexpr int MOST_TRIES = 64;  // of one extent, interruptions and short answers together
}

Pages::Pages(size_t bytes) : bytes_(bytes) {
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(got);
}

Pages::~Pages() { munmap(data_, bytes_); }

Reader::Reader(std::vector<int> files, int depth, int64_t buffer_bytes)
    : files_(std::move(files)), depth_(depth), buffer_bytes_(buffer_bytes) {}

void Reader::inject(const Fault& fault) {
    const std::lock_guard lock(fault_mutex_);
    fault_ = fault;
    faulty_.store(fault.count > 0, std::memory_order_release);
}

Fault Reader::draw() {
    if (!faulty_.load(std::memory_order_acquire)) return {};
    const std::lock_guard lock(fault_mutex_);
    if (fault_.after > 0) {
        --fault_.after;
        return {};
    }
    if (fault_.count <= 0) return {};
    if (--fault_.count == 0) faulty_.store(false, std::memory_order_release);
    return fault_;
}

void Reader::take(size_t most, std::vector<Take>& into) {
    while (!queue_.empty()) {
        const std::shared_ptr<Job>& job = queue_.front();
        const auto& extents = job->extents();
        if (!job->over()) {
            while (most > 0 && job->next < extents.size()) {
                into.push_back({job, &extents[job->next++]});
                --most;
            }
            if (job->next < extents.size()) return;
        }
        queue_.pop_front();
        if (!into.empty()) return;
    }
}

bool Reader::idle() {
    while (!queue_.empty() && (queue_.front()->over() || queue_.front()->next >= queue_.front()->extents().size())) {
        queue_.pop_front();
    }
    return queue_.empty();
}

void Reader::fail_queued(int code) {
    for (const auto& job : queue_) job->fail({code, 0, 0});
    queue_.clear();
}

Outcome Reader::settle(const Take& what, Progress& at, int64_t result, const uint8_t* buffer) {
    const Extent& e = *what.extent;
    counters_.reads.fetch_add(1, std::memory_order_relaxed);
    if (result > 0) counters_.bytes.fetch_add(result, std::memory_order_relaxed);
    if (what.job->over()) return Outcome::failed;
    const bool interrupted = result == -EINTR || result == -EAGAIN;
    if (++at.tries > MOST_TRIES || (result < 0 && !interrupted)) {
        what.job->fail({result < 0 ? static_cast<int>(-result) : END_OF_FILE, e.file, e.start + at.got});
        return Outcome::failed;
    }
    if (!interrupted) {
        const int64_t reached = at.base() + result;
        if (reached >= e.needed) {
            what.job->deliver(e, buffer);
            return Outcome::complete;
        }
        // The same short answer twice is the end of the file, not an interruption.
        if (reached <= at.got) {
            what.job->fail({END_OF_FILE, e.file, e.start + at.got});
            return Outcome::failed;
        }
        at.got = reached;
    }
    counters_.retries.fetch_add(1, std::memory_order_relaxed);
    return Outcome::again;
}

}  // namespace civetta
