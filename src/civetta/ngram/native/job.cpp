#include "job.hpp"

#include <chrono>
#include <cstring>

namespace civetta {

namespace {

std::atomic<int64_t> jobs_alive{0};

// Pieces come sorted by file and offset. A piece joins the extent before it when their pages touch
// and the read stays short enough for a reader's buffer.
std::vector<Extent> plan(const std::vector<Piece>& pieces) {
    std::vector<Extent> extents;
    extents.reserve(pieces.size());
    for (uint32_t i = 0; i < pieces.size(); ++i) {
        const Piece& p = pieces[i];
        const int64_t start = p.offset / PAGE * PAGE;
        const int64_t stop = (p.offset + p.bytes + PAGE - 1) / PAGE * PAGE;
        if (!extents.empty()) {
            Extent& e = extents.back();
            if (e.file == p.file && start <= e.start + e.bytes && stop - e.start <= MERGE_BYTES) {
                const int64_t bytes = stop - e.start, needed = p.offset + p.bytes - e.start;
                if (bytes > e.bytes) e.bytes = static_cast<int32_t>(bytes);
                if (needed > e.needed) e.needed = static_cast<int32_t>(needed);
                e.last = i + 1;
                continue;
            }
        }
        extents.push_back({start, static_cast<int32_t>(stop - start),
                           static_cast<int32_t>(p.offset + p.bytes - start), p.file, i, i + 1});
    }
    return extents;
}

}  // namespace

Job::Job(std::vector<Piece> pieces, size_t out_bytes)
    : pieces_(std::move(pieces)),
      extents_(plan(pieces_)),
      out_(new uint8_t[out_bytes]),
      out_bytes_(out_bytes),
      left_(extents_.size()) {
    if (extents_.empty()) state_.store(State::done, std::memory_order_release);
    ++jobs_alive;
}

Job::~Job() { --jobs_alive; }

int64_t Job::alive() { return jobs_alive.load(); }

void Job::deliver(const Extent& extent, const uint8_t* pages) {
    for (uint32_t i = extent.first; i < extent.last; ++i) {
        const Piece& p = pieces_[i];
        std::memcpy(out_.get() + p.out, pages + (p.offset - extent.start), static_cast<size_t>(p.bytes));
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) end(State::done, {});
}

void Job::fail(const Failure& failure) { end(State::failed, failure); }

void Job::cancel() { end(State::cancelled, {}); }

void Job::end(State state, const Failure& failure) {
    {
        const std::lock_guard lock(mutex_);
        if (state_.load(std::memory_order_relaxed) != State::running) return;
        failure_ = failure;
        state_.store(state, std::memory_order_release);
    }
    ended_.notify_all();
}

Failure Job::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

bool Job::wait(int64_t timeout_ms) {
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                           [this] { return state_.load(std::memory_order_relaxed) != State::running; });
}

}  // namespace civetta
