// A gather on its way: which bytes of which files go where, and how far it has come.
//
// Pieces are what the caller wants (a row, or one field of it); extents are what is read: whole
// pages, neighbours merged. The job owns the memory that rows are copied into, and every reader that
// still works on it holds a reference, so a waiter may give up at any time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace civetta {

constexpr int64_t PAGE = 4096;           // alignment of O_DIRECT reads: offset, length, memory
constexpr int64_t MERGE_BYTES = 4 * PAGE;  // longest read that neighbours are merged into

struct Piece {
    int64_t offset;  // bytes from the start of the file
    int64_t out;     // bytes from the start of the job's memory
    int32_t file;
    int32_t bytes;
};

struct Extent {
    int64_t start;   // a multiple of PAGE
    int32_t bytes;   // a multiple of PAGE
    int32_t needed;  // bytes from `start` on that its pieces cover
    int32_t file;
    uint32_t first, last;  // pieces [first, last)
};

enum class State : int { running, done, failed, cancelled };

// Why a job failed. `code` is an errno, or one of these.
constexpr int END_OF_FILE = -1;
constexpr int READER_ENDED = -2;

struct Failure {
    int code = 0;
    int32_t file = 0;
    int64_t offset = 0;
};

class Job {
   public:
    Job(std::vector<Piece> pieces, size_t out_bytes);
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    const std::vector<Extent>& extents() const { return extents_; }
    const uint8_t* out() const { return out_.get(); }
    size_t out_bytes() const { return out_bytes_; }

    // Copies the pieces of an extent out of the pages that were read, and counts it as done.
    void deliver(const Extent& extent, const uint8_t* pages);
    void fail(const Failure& failure);
    void cancel();
    bool over() const { return state_.load(std::memory_order_acquire) != State::running; }
    State state() const { return state_.load(std::memory_order_acquire); }
    Failure failure() const;
    size_t left() const { return left_.load(std::memory_order_acquire); }
    // Whether the job was over within `timeout_ms`.
    bool wait(int64_t timeout_ms);

    size_t next = 0;  // first extent that no reader has taken; guarded by the reader's queue

    static int64_t alive();  // jobs in memory, for leak tests

   private:
    void end(State state, const Failure& failure);

    std::vector<Piece> pieces_;
    std::vector<Extent> extents_;
    std::unique_ptr<uint8_t[]> out_;
    size_t out_bytes_;
    std::atomic<size_t> left_;
    std::atomic<State> state_{State::running};
    mutable std::mutex mutex_;
    std::condition_variable ended_;
    Failure failure_;
};

}  // namespace civetta
