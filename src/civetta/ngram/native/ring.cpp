// One thread that keeps up to `depth` reads in flight through io_uring, by the system calls alone.
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "reader.hpp"

namespace civetta {

namespace {

constexpr uint64_t TIMER = ~uint64_t{0};  // user_data of a delay that a test asked for
constexpr uint64_t BELL = TIMER - 1;      // user_data of the poll that a new job answers
constexpr unsigned BATCH = 16;            // answers to wait for while the queue is deep
constexpr unsigned NEEDED = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;

int setup(unsigned entries, io_uring_params& params) {
    constexpr unsigned wishes[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,  // 6.1
        IORING_SETUP_COOP_TASKRUN,                                // 5.19
        0,
    };
    for (const unsigned wish : wishes) {
        std::memset(&params, 0, sizeof params);
        params.flags = wish | IORING_SETUP_CLAMP;
        const int fd = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
        if (fd >= 0 || errno != EINVAL) return fd;
    }
    return -1;
}

// The two rings shared with the kernel.
class Rings {
   public:
    explicit Rings(unsigned entries) {
        io_uring_params p;
        fd_ = setup(entries, p);
        if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "io_uring_setup");
        bytes_ = std::max<size_t>(p.sq_off.array + p.sq_entries * sizeof(unsigned),
                                  p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe));
        sqe_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
        base_ = map(bytes_, IORING_OFF_SQ_RING);
        sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
        sq_head_ = at(p.sq_off.head), sq_tail_ = at(p.sq_off.tail);
        cq_head_ = at(p.cq_off.head), cq_tail_ = at(p.cq_off.tail);
        mask_ = *at(p.sq_off.ring_mask), cq_mask_ = *at(p.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(base_ + p.cq_off.cqes);
        unsigned* const array = at(p.sq_off.array);
        for (unsigned i = 0; i < p.sq_entries; ++i) array[i] = i;
        tail_ = *sq_tail_;
    }
    ~Rings() {
        if (sqes_ != nullptr) munmap(sqes_, sqe_bytes_);
        if (base_ != nullptr) munmap(base_, bytes_);
        ::close(fd_);
    }
    Rings(const Rings&) = delete;
    Rings& operator=(const Rings&) = delete;

    io_uring_sqe& next() {
        while (unsent_ > mask_) enter(0);
        io_uring_sqe& sqe = sqes_[tail_++ & mask_];
        std::memset(&sqe, 0, sizeof sqe);
        ++unsent_;
        return sqe;
    }

    // Sends what is prepared and waits for `answers` answers; may return early.
    void enter(unsigned answers) {
        __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
        const long sent = syscall(__NR_io_uring_enter, fd_, unsent_, answers, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (sent >= 0) {
            unsent_ -= static_cast<unsigned>(sent);
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            throw std::system_error(errno, std::generic_category(), "io_uring_enter");
        }
    }

    template <typename Use>
    void reap(Use use) {
        unsigned head = *cq_head_;
        const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
        while (head != tail) {
            const io_uring_cqe cqe = cqes_[head++ & cq_mask_];
            __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
            use(cqe);
        }
    }

    bool register_with(unsigned what, const void* argument, unsigned count) {
        return syscall(__NR_io_uring_register, fd_, what, argument, count) == 0;
    }

   private:
    uint8_t* map(size_t bytes, uint64_t offset) {
        void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                         static_cast<off_t>(offset));
        if (got == MAP_FAILED) throw std::bad_alloc();
        return static_cast<uint8_t*>(got);
    }
    unsigned* at(unsigned offset) { return reinterpret_cast<unsigned*>(base_ + offset); }

    int fd_ = -1;
    size_t bytes_ = 0, sqe_bytes_ = 0;
    uint8_t* base_ = nullptr;
    io_uring_sqe* sqes_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned mask_ = 0, cq_mask_ = 0, tail_ = 0, unsent_ = 0;
};

struct Slot {
    Take what;
    Progress at;
    Fault fault;
    __kernel_timespec delay;
};

// What the thread works with; lives as long as the thread.
struct Flight {
    Flight(const std::vector<int>& files, int depth, int64_t buffer_bytes)
        : slots(static_cast<size_t>(depth)),
          pages(static_cast<size_t>(depth) * static_cast<size_t>(buffer_bytes)),
          rings(2 * static_cast<unsigned>(depth)) {
        for (int i = depth; i-- > 0;) free.push_back(static_cast<unsigned>(i));
        // Both save the kernel work on every read; a low limit on locked memory may refuse the second.
        fixed_files = rings.register_with(IORING_REGISTER_FILES, files.data(), static_cast<unsigned>(files.size()));
        const iovec whole{pages.data(), pages.size()};
        fixed_pages = rings.register_with(IORING_REGISTER_BUFFERS, &whole, 1);
    }
    unsigned used() const { return static_cast<unsigned>(slots.size() - free.size()); }

    std::vector<Slot> slots;
    std::vector<unsigned> free;
    Pages pages;
    Rings rings;
    bool fixed_files = false, fixed_pages = false;
    unsigned flying = 0;  // reads that the kernel has, or is about to get
};

class Ring final : public Reader {
   public:
    Ring(std::vector<int> files, int depth, int64_t buffer_bytes)
        : Reader(std::move(files), depth, buffer_bytes), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (bell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~Ring() override {
        close();
        ::close(bell_);
    }

    void submit(std::shared_ptr<Job> job) override {
        {
            const std::lock_guard lock(mutex_);
            if (stop_) {
                job->fail({READER_ENDED, 0, 0});
                return;
            }
            queue_.push_back(std::move(job));
            ++counters_.wakes;
            if (counters_.threads == 0 && !start()) return fail_queued(EAGAIN);
            // One read that hangs must not keep the thread from the jobs behind it.
            if (!resting_) ring_bell();
        }
        changed_.notify_one();
    }

    void close() override {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
            fail_queued(READER_ENDED);
            ring_bell();
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

   private:
    bool start() {
        if (thread_.joinable()) thread_.join();
        counters_.threads = 1;
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error&) {
            counters_.threads = 0;
            return false;
        }
        return true;
    }

    void ring_bell() const {
        const uint64_t one = 1;
        static_cast<void>(!write(bell_, &one, sizeof one));  // full is as good as rung
    }

    void listen(Flight& flight) const {
        io_uring_sqe& sqe = flight.rings.next();
        sqe.opcode = IORING_OP_POLL_ADD;
        sqe.fd = bell_;
        sqe.poll32_events = POLLIN;
        sqe.user_data = BELL;
    }

    void run() {
        do {
            std::unique_ptr<Flight> flight;
            try {
                flight = std::make_unique<Flight>(files_, depth_, buffer_bytes_);
                listen(*flight);
                while (fill(*flight)) turn(*flight);
            } catch (...) {  // a thread's root: the work in hand fails, the rest goes on afresh
                ++counters_.died;
            }
            {
                const std::lock_guard lock(mutex_);
                if (flight) {
                    fail_flying(*flight);
                } else {
                    fail_queued(READER_ENDED);
                }
            }
            if (flight) land(std::move(flight));
        } while (!finished());
    }

    // Whether the thread may end: nothing is left to read.
    bool finished() {
        const std::lock_guard lock(mutex_);
        if (stop_) fail_queued(READER_ENDED);
        if (!idle()) return false;
        counters_.threads = 0;
        return true;
    }

    // Prepares reads for the free slots; waits for a job when nothing flies. False at the end.
    bool fill(Flight& flight) {
        taken_.clear();
        {
            std::unique_lock lock(mutex_);
            if (flight.used() == 0) {
                resting_ = true;
                changed_.wait(lock, [this] { return stop_ || !idle(); });
                resting_ = false;
            }
            if (stop_) return false;
            while (taken_.size() < flight.free.size()) {
                const size_t before = taken_.size();
                take(flight.free.size() - before, taken_);
                if (taken_.size() == before) break;
            }
            more_ = !queue_.empty();
        }
        for (Take& what : taken_) {
            const unsigned at = flight.free.back();
            flight.free.pop_back();
            flight.slots[at] = {std::move(what), {}, {}, {}};
            prepare(flight, at);
        }
        return true;
    }

    void prepare(Flight& flight, unsigned at) {
        Slot& slot = flight.slots[at];
        slot.fault = draw();
        if (slot.fault.die) throw ThreadDied();
        if (slot.fault.delay_us > 0) {
            slot.delay = {slot.fault.delay_us / 1'000'000, slot.fault.delay_us % 1'000'000 * 1000};
            io_uring_sqe& timer = flight.rings.next();
            timer.opcode = IORING_OP_TIMEOUT;
            timer.fd = -1;
            timer.addr = reinterpret_cast<uint64_t>(&slot.delay);
            timer.len = 1;
            timer.flags = IOSQE_IO_HARDLINK;  // the read behind it starts although the timer "fails"
            timer.user_data = TIMER;
        }
        const Extent& e = *slot.what.extent;
        const int64_t base = slot.at.base();
        io_uring_sqe& sqe = flight.rings.next();
        sqe.opcode = flight.fixed_pages ? IORING_OP_READ_FIXED : IORING_OP_READ;
        sqe.fd = flight.fixed_files ? e.file : files_[static_cast<size_t>(e.file)];
        sqe.flags = flight.fixed_files ? IOSQE_FIXED_FILE : 0;
        sqe.addr = reinterpret_cast<uint64_t>(buffer(flight, at) + base);
        sqe.len = static_cast<uint32_t>(e.bytes - base);
        sqe.off = static_cast<uint64_t>(e.start + base);
        sqe.user_data = at;
        ++flight.flying;
    }

    uint8_t* buffer(const Flight& flight, unsigned at) const {
        return flight.pages.data() + static_cast<size_t>(at) * static_cast<size_t>(buffer_bytes_);
    }

    void turn(Flight& flight) {
        const unsigned used = flight.used();
        if (used == 0) return;
        flight.rings.enter(more_ ? std::clamp(used / 4, 1U, BATCH) : 1U);
        flight.rings.reap([&](const io_uring_cqe& cqe) {
            if (cqe.user_data == TIMER) return;
            if (cqe.user_data == BELL) {
                uint64_t rung = 0;
                static_cast<void>(!read(bell_, &rung, sizeof rung));
                return listen(flight);
            }
            --flight.flying;
            const unsigned at = static_cast<unsigned>(cqe.user_data);
            Slot& slot = flight.slots[at];
            int64_t result = cqe.res;
            if (slot.fault.error != 0) result = -slot.fault.error;
            if (slot.fault.short_bytes >= 0) result = std::min(result, slot.fault.short_bytes);
            if (settle(slot.what, slot.at, result, buffer(flight, at)) == Outcome::again) {
                prepare(flight, at);
            } else {
                slot.what.job.reset();
                flight.free.push_back(at);
            }
        });
    }

    void fail_flying(Flight& flight) {
        for (Slot& slot : flight.slots) {
            if (slot.what.job) slot.what.job->fail({READER_ENDED, slot.what.extent->file, slot.what.extent->start});
        }
        for (const Take& what : taken_) {
            if (what.job) what.job->fail({READER_ENDED, what.extent->file, what.extent->start});
        }
        taken_.clear();
    }

    // Lets go of the buffers only when the kernel writes to none of them any more: closing a ring
    // does not wait for its reads.
    static void land(std::unique_ptr<Flight> flight) {
        try {
            while (flight->flying > 0) {
                flight->rings.enter(1);
                flight->rings.reap([&](const io_uring_cqe& cqe) { flight->flying -= cqe.user_data < BELL; });
            }
        } catch (const std::system_error&) {
            static_cast<void>(flight.release());  // memory the kernel may still write to is never reused
        }
    }

    const int bell_;
    std::thread thread_;
    std::vector<Take> taken_;
    bool more_ = false;
    bool resting_ = false;  // the thread waits for a job, and not for the kernel
};

}  // namespace

bool ring_allowed() {
    io_uring_params params;
    const int fd = setup(2, params);
    if (fd < 0) return false;
    ::close(fd);
    return (params.features & NEEDED) == NEEDED;
}

std::unique_ptr<Reader> make_ring(std::vector<int> files, int depth, int64_t buffer_bytes) {
    return std::make_unique<Ring>(std::move(files), depth, buffer_bytes);
}

}  // namespace civetta
