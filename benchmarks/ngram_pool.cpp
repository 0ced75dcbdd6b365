// The yardstick of ngram_reader.py: the plain pool of blocking readers, one pread a page, nothing
// merged, nothing clever. usage: ngram_pool FILE OFFSETS THREADS   (OFFSETS: int64 page offsets)
// prints: seconds, CPU seconds, checksum
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

constexpr size_t PAGE = 4096;

double cpu_seconds() {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    return seconds(use.ru_utime) + seconds(use.ru_stime);
}

std::vector<int64_t> load(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (file == nullptr) return {};
    std::fseek(file, 0, SEEK_END);
    std::vector<int64_t> out(static_cast<size_t>(std::ftell(file)) / sizeof(int64_t));
    std::rewind(file);
    if (std::fread(out.data(), sizeof(int64_t), out.size(), file) != out.size()) out.clear();
    std::fclose(file);
    return out;
}

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    int fd = open(argv[1], O_RDONLY | O_DIRECT);
    if (fd < 0) fd = open(argv[1], O_RDONLY);
    const std::vector<int64_t> offsets = load(argv[2]);
    const int threads = std::atoi(argv[3]);
    if (fd < 0 || offsets.empty() || threads < 1) return 2;

    std::atomic<size_t> next{0};
    std::atomic<uint64_t> sum{0}, failed{0};
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; ++i) {
        pool.emplace_back([&] {
            void* page = nullptr;
            if (posix_memalign(&page, PAGE, PAGE) != 0) std::abort();
            ++ready;
            while (!go) std::this_thread::yield();
            for (size_t at; (at = next.fetch_add(1)) < offsets.size();) {
                if (pread(fd, page, PAGE, offsets[at]) != static_cast<ssize_t>(PAGE)) ++failed;
                sum += static_cast<const uint8_t*>(page)[at % PAGE];
            }
            std::free(page);
        });
    }
    while (ready < threads) std::this_thread::yield();
    const double cpu = cpu_seconds();
    const auto began = std::chrono::steady_clock::now();
    go = true;
    for (auto& thread : pool) thread.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    std::printf("%.6f %.6f %llu\n", seconds, cpu_seconds() - cpu, static_cast<unsigned long long>(sum.load()));
    return failed == 0 ? 0 : 1;
}
