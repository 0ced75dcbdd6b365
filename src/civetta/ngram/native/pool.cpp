// A pool of blocking readers, for kernels that do not allow io_uring. Threads start when a gather
// first needs them, and a gather wakes no more of them than it has reads.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <list>
#include <system_error>
#include <thread>

#include "reader.hpp"

namespace civetta {

namespace {

constexpr size_t MOST_AT_ONCE = 8;  // extents that a thread takes under one lock

struct Worker {
    std::thread thread;
    std::atomic<bool> ended{false};
};

class Pool final : public Reader {
   public:
    Pool(std::vector<int> files, int threads, int64_t buffer_bytes)
        : Reader(std::move(files), threads, buffer_bytes) {}
    ~Pool() override { close(); }

    void submit(std::shared_ptr<Job> job) override {
        const std::lock_guard lock(mutex_);
        if (stop_) {
            job->fail({READER_ENDED, 0, 0});
            return;
        }
        reap();
        const int wanted = static_cast<int>(std::min<size_t>(job->extents().size(), static_cast<size_t>(depth_)));
        queue_.push_back(std::move(job));
        const int woken = std::min(wanted, idle_);
        idle_ -= woken;
        called_ += woken;
        for (int i = 0; i < woken; ++i) changed_.notify_one();
        int started = 0;
        while (woken + started < wanted && counters_.threads < depth_ && start()) ++started;
        counters_.wakes += woken + started;
        if (counters_.threads == 0) fail_queued(EAGAIN);
    }

    void close() override {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
            fail_queued(READER_ENDED);
        }
        changed_.notify_all();
        for (auto& worker : workers_) worker.thread.join();
        workers_.clear();
    }

   private:
    bool start() {
        Worker& worker = workers_.emplace_back();
        ++counters_.threads;
        try {
            worker.thread = std::thread([this, &worker] { run(worker); });
        } catch (const std::system_error&) {
            --counters_.threads;
            workers_.pop_back();
            return false;
        }
        return true;
    }

    void reap() {
        for (auto at = workers_.begin(); at != workers_.end();) {
            if (at->ended) {
                at->thread.join();
                at = workers_.erase(at);
            } else {
                ++at;
            }
        }
    }

    void run(Worker& self) {
        std::vector<Take> taken;
        try {
            const Pages pages(static_cast<size_t>(buffer_bytes_));
            while (next(taken)) {
                for (const Take& what : taken) read(what, pages.data());
                taken.clear();
            }
        } catch (...) {  // a thread's root: its work fails, the process lives
            for (const Take& what : taken) what.job->fail({READER_ENDED, what.extent->file, what.extent->start});
            ++counters_.died;
        }
        const std::lock_guard lock(mutex_);
        if (--counters_.threads == 0) fail_queued(READER_ENDED);
        self.ended = true;
    }

    // The extents to read next; false at the end.
    bool next(std::vector<Take>& taken) {
        std::unique_lock lock(mutex_);
        while (!stop_) {
            take(share(), taken);
            if (!taken.empty()) return true;
            ++idle_;
            changed_.wait(lock, [this] { return stop_ || called_ > 0; });
            if (!stop_) --called_;
        }
        return false;
    }

    // Many at once saves locking while a lot is left, one at a time shares out what is little.
    size_t share() const {
        if (queue_.empty()) return 1;
        const Job& job = *queue_.front();
        const size_t left = job.extents().size() - job.next;
        return std::clamp<size_t>(left / (4 * static_cast<size_t>(depth_)), 1, MOST_AT_ONCE);
    }

    void read(const Take& what, uint8_t* buffer) {
        const Extent& e = *what.extent;
        Progress at;
        Outcome outcome = Outcome::again;
        while (outcome == Outcome::again && !what.job->over()) {
            const Fault fault = draw();
            if (fault.die) throw ThreadDied();
            if (fault.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(fault.delay_us));
            const int64_t base = at.base();
            int64_t result = pread(files_[static_cast<size_t>(e.file)], buffer + base,
                                   static_cast<size_t>(e.bytes - base), e.start + base);
            if (result < 0) result = -errno;
            if (fault.error != 0) result = -fault.error;
            if (fault.short_bytes >= 0) result = std::min(result, fault.short_bytes);
            outcome = settle(what, at, result, buffer);
        }
    }

    std::list<Worker> workers_;
    int idle_ = 0;    // threads that wait and were not called
    int called_ = 0;  // calls that no thread has answered yet
};

}  // namespace

std::unique_ptr<Reader> make_pool(std::vector<int> files, int threads, int64_t buffer_bytes) {
    return std::make_unique<Pool>(std::move(files), threads, buffer_bytes);
}

}  // namespace civetta
