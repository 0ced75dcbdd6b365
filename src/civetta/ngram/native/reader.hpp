// What both readers share: the queue of jobs, the faults that tests ask for, counters, and the rule
// by which a read that came back short goes on or fails.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "job.hpp"

namespace civetta {

// What the next reads suffer, for tests: reads [after, after + count) from now on.
struct Fault {
    int error = 0;            // errno to answer with
    int64_t short_bytes = -1;  // answer at most this many bytes
    int64_t delay_us = 0;     // answer this much later
    bool die = false;         // end the thread
    int64_t after = 0;
    int64_t count = 0;
};

struct Counters {
    std::atomic<int64_t> reads{0}, bytes{0}, retries{0}, wakes{0}, died{0}, threads{0};
};

struct Take {
    std::shared_ptr<Job> job;
    const Extent* extent;
};

// One extent on its way into a buffer of `capacity` bytes.
struct Progress {
    int64_t got = 0;  // bytes that lie in the buffer
    int tries = 0;

    int64_t base() const { return got / PAGE * PAGE; }  // where to read on, aligned
};

enum class Outcome { complete, again, failed };

class ThreadDied {};

class Reader {
   public:
    Reader(std::vector<int> files, int depth, int64_t buffer_bytes);
    virtual ~Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

    virtual void submit(std::shared_ptr<Job> job) = 0;
    virtual void close() = 0;

    void inject(const Fault& fault);
    const Counters& counters() const { return counters_; }
    int depth() const { return depth_; }
    int64_t buffer_bytes() const { return buffer_bytes_; }

   protected:
    // Up to `most` extents of the oldest job that has any left; jobs that are over are dropped.
    void take(size_t most, std::vector<Take>& into);
    bool idle();  // whether no extent is left to take
    void fail_queued(int code);
    Fault draw();
    // What a read of `extent` that answered `result` (bytes or -errno) means; fails the job if so.
    Outcome settle(const Take& what, Progress& at, int64_t result, const uint8_t* buffer);

    const std::vector<int> files_;
    const int depth_;
    const int64_t buffer_bytes_;
    Counters counters_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Job>> queue_;
    bool stop_ = false;

   private:
    std::mutex fault_mutex_;
    Fault fault_;
    std::atomic<bool> faulty_{false};
};

std::unique_ptr<Reader> make_pool(std::vector<int> files, int threads, int64_t buffer_bytes);
std::unique_ptr<Reader> make_ring(std::vector<int> files, int depth, int64_t buffer_bytes);
bool ring_allowed();

// Pages of memory that O_DIRECT may write to.
class Pages {
   public:
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return bytes_; }

   private:
    uint8_t* data_;
    size_t bytes_;
};

}  // namespace civetta
