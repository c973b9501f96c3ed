// Threads that run one function together, with barriers between its stages.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isthmus {

// A barrier whose waiters spin for a short while, then sleep: a thread that lost its core must not cost others theirs.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        if (threads_ == 1) return;
        const unsigned turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> hold(mutex_);
                turn_.store(turn + 1, std::memory_order_release);
            }
            wake_.notify_all();
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (turn_.load(std::memory_order_acquire) != turn) return;
            pause();
        }
        std::unique_lock<std::mutex> hold(mutex_);
        wake_.wait(hold, [&] { return turn_.load(std::memory_order_acquire) != turn; });
    }

  private:
    static constexpr int SPINS = 700;
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#else
        std::this_thread::yield();
#endif
    }
    const int threads_;
    std::atomic<int> arrived_{0};
    std::atomic<unsigned> turn_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

// `run` calls work(thread) on every thread, the caller's being number 0, and returns when all are done.
class Pool {
  public:
    explicit Pool(int threads) : barrier(threads), count(threads) {
        for (int i = 1; i < threads; i++) others_.emplace_back([this, i] { serve(i); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            stopping_ = true;
            turn_++;
        }
        start_.notify_all();
        for (auto& t : others_) t.join();
    }
    template <class F>
    void run(F&& work) {
        if (count > 1) {
            work_ = [](void* f, int i) { (*(std::remove_reference_t<F>*)f)(i); };
            argument_ = &work;
            {
                std::lock_guard<std::mutex> hold(mutex_);
                turn_++;
            }
            start_.notify_all();
        }
        work(0);
        barrier.wait();
    }
    Barrier barrier;
    const int count;

  private:
    void serve(int i) {
        unsigned seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> hold(mutex_);
                start_.wait(hold, [&] { return turn_ != seen; });
                seen = turn_;
                if (stopping_) return;
            }
            work_(argument_, i);
            barrier.wait();
        }
    }
    std::vector<std::thread> others_;
    std::mutex mutex_;
    std::condition_variable start_;
    unsigned turn_ = 0;
    bool stopping_ = false;
    void (*work_)(void*, int) = nullptr;
    void* argument_ = nullptr;
};

}  // namespace isthmus
