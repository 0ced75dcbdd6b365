#include "pool.hpp"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace civetta {
namespace {

// A worker looks for work this often (some 50 us) before it sleeps: calls of one token's forward
// come closer together than that, and waking a sleeper costs more than a small product.
constexpr int SPINS = 2000;

// Work that takes about two microseconds: less does not pay for a second thread.
constexpr int64_t ALONE = 60000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

class Pool {
  public:
    explicit Pool(int threads) : threads_(threads) {
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // The system grants no more threads: fewer do the same work.
        }
    }

    ~Pool() {
        closing_.store(true);
        wake();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    void run(int64_t count, const std::function<void(int64_t)>& task) {
        task_ = &task;
        count_ = count;
        pending_.store(count, std::memory_order_relaxed);
        left_.store(count);  // publishes the three lines above to whoever takes a task
        if (sleepers_.load() > 0) wake();
        take_tasks();
        for (int spin = 0; pending_.load(std::memory_order_acquire) > 0; ++spin) {
            if (spin < SPINS) relax(); else std::this_thread::yield();
        }
    }

  private:
    // `left_` counts down past zero, so a late comer's decrement takes nothing, and one that meets
    // the next call's count takes a task of that call: no task is lost or run twice.
    void take_tasks() {
        while (left_.load(std::memory_order_relaxed) > 0) {
            const int64_t ticket = left_.fetch_sub(1);
            if (ticket <= 0) return;
            (*task_)(count_ - ticket);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }

    void work() {
        int spin = 0;
        while (!closing_.load(std::memory_order_relaxed)) {
            if (left_.load(std::memory_order_relaxed) > 0) {
                take_tasks();
                spin = 0;
            } else if (spin < SPINS) {
                ++spin;
                relax();
            } else {
                const uint32_t epoch = epoch_.load();
                sleepers_.fetch_add(1);
                // A call that saw no sleeper has set `left_` before this look at it.
                if (left_.load() <= 0 && !closing_.load()) epoch_.wait(epoch);
                sleepers_.fetch_sub(1);
                spin = 0;
            }
        }
    }

    void wake() {
        epoch_.fetch_add(1);
        epoch_.notify_all();
    }

    const int threads_;
    const std::function<void(int64_t)>* task_ = nullptr;
    int64_t count_ = 0;
    alignas(64) std::atomic<int64_t> left_{0};
    alignas(64) std::atomic<int64_t> pending_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;  // last: they start when the rest is there
};

// Never destroyed: at exit a thread may still be inside a call, and a child of fork has the object
// but not the threads.
struct Shared {
    std::mutex busy;
    std::unique_ptr<Pool> pool;
    std::atomic<int> wanted{1};
};

std::atomic<Shared*> shared{nullptr};

void forget_after_fork() {
    const int wanted = shared.load()->wanted.load();
    shared.store(new Shared);  // the old one may be locked by a thread that is not here
    shared.load()->wanted.store(wanted);
}

Shared& get_shared() {
    static const bool made = [] {
        shared.store(new Shared);
        pthread_atfork(nullptr, nullptr, forget_after_fork);
        return true;
    }();
    (void)made;
    return *shared.load();
}

}  // namespace

void set_threads(int threads) { get_shared().wanted.store(threads < 1 ? 1 : threads); }

int get_threads() { return get_shared().wanted.load(); }

void parallel_for(int64_t count, int64_t work, const std::function<void(int64_t)>& task) {
    Shared& s = get_shared();
    const int wanted = s.wanted.load(std::memory_order_relaxed);
    std::unique_lock<std::mutex> lock(s.busy, std::defer_lock);
    if (count < 2 || work < ALONE || wanted < 2 || !lock.try_lock()) {
        for (int64_t i = 0; i < count; ++i) task(i);
        return;
    }
    if (!s.pool || s.pool->threads() != wanted) {
        s.pool.reset();
        s.pool = std::make_unique<Pool>(wanted);
    }
    s.pool->run(count, task);
}

void shut_down() {
    Shared& s = get_shared();
    s.wanted.store(1);
    const std::lock_guard<std::mutex> lock(s.busy);
    s.pool.reset();
}

}  // namespace civetta
