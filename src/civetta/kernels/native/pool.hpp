// One set of persistent threads a process. The caller works too; whoever is free takes the next
// task, and since a task's result never depends on who runs it, the thread count changes no bits.
#pragma once

#include <cstdint>
#include <functional>

namespace civetta {

// Threads that work on a call, the caller included. Takes effect at the next call.
void set_threads(int threads);
int get_threads();

// Runs task(0 .. count - 1), each once, and returns when all are done; tasks must not throw. `work` is
// their sum in multiply-adds or values moved: too little, or another caller in the pool, and the tasks
// run on the calling thread alone.
void parallel_for(int64_t count, int64_t work, const std::function<void(int64_t)>& task);

// Ends the threads; later calls run on their caller alone.
void shut_down();

}  // namespace civetta
