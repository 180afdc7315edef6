// The scheduler of emulator.hpp, and the entry that Python calls. KERNEL_LIST and the kernels come from the generated file that
// includes this one (impls/cuda/emulate.py).
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sys/mman.h>
#include <tuple>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;
unsigned char* paritree_dynamic_shared;

namespace paritree_emulator {
namespace {

constexpr std::size_t kStack = 1 << 17;  // bytes a fiber; touched pages only are taken
constexpr unsigned kThreads = 1024;
constexpr std::size_t kShared = 1 << 18;
constexpr std::size_t kGuard = 256;

enum class State { ready, block, warp, done };

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  State state = State::done;
};

Fiber fibers[kThreads];
unsigned char* stacks = nullptr;
uint64_t slots[kThreads / 32][32];
unsigned arrived[kThreads / 32];
unsigned current = 0;
const std::function<void()>* body = nullptr;
alignas(256) unsigned char shared_memory[kShared + kGuard];

#if defined(__x86_64__)
void* main_stack_pointer = nullptr;
extern "C" void paritree_switch(void** save, void* load);
asm(R"(
.text
.globl paritree_switch
.hidden paritree_switch
paritree_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void to_main() { paritree_switch(&fibers[current].stack_pointer, main_stack_pointer); }
void to_fiber() { paritree_switch(&main_stack_pointer, fibers[current].stack_pointer); }
#else
ucontext_t main_context;
void to_main() { swapcontext(&fibers[current].context, &main_context); }
void to_fiber() { swapcontext(&main_context, &fibers[current].context); }
#endif

void run_fiber() {
  (*body)();
  fibers[current].state = State::done;
  to_main();
  std::abort();  // a finished fiber is never resumed
}

void prepare(unsigned thread) {
  unsigned char* top = stacks + (thread + 1) * kStack;
#if defined(__x86_64__)
  // as paritree_switch leaves it: six registers, then the address to return to; the stack is 8 modulo 16 at a function's entry
  auto** frame = reinterpret_cast<void**>(top - 8);
  *--frame = reinterpret_cast<void*>(run_fiber);
  for (int i = 0; i < 6; ++i) *--frame = nullptr;
  fibers[thread].stack_pointer = frame;
#else
  getcontext(&fibers[thread].context);
  fibers[thread].context.uc_stack.ss_sp = top - kStack;
  fibers[thread].context.uc_stack.ss_size = kStack;
  fibers[thread].context.uc_link = nullptr;
  makecontext(&fibers[thread].context, run_fiber, 0);
#endif
  fibers[thread].state = State::ready;
}

uint64_t random_state;
uint32_t random_number() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(random_state >> 33);
}

// Null, or what went wrong.
const char* run_block(unsigned threads, std::vector<unsigned>& order, bool shuffled) {
  for (unsigned t = 0; t < threads; ++t) prepare(t);
  for (unsigned w = 0; w < (threads + 31) / 32; ++w) arrived[w] = 0;
  unsigned done = 0;
  while (done < threads) {
    if (shuffled) {
      for (unsigned i = threads - 1; i > 0; --i) std::swap(order[i], order[random_number() % (i + 1)]);
    }
    bool ran = false;
    for (const unsigned t : order) {
      if (fibers[t].state != State::ready) continue;
      current = t;
      threadIdx.x = t;
      to_fiber();
      ran = true;
      if (fibers[t].state == State::done) ++done;
    }
    if (ran) continue;
    if (done > 0) return "a barrier is missed by threads that have returned";
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t].state != State::block) return "threads wait at a warp exchange and at a block barrier for each other";
    }
    for (unsigned t = 0; t < threads; ++t) fibers[t].state = State::ready;
  }
  return nullptr;
}

}  // namespace

void block_barrier() {
  fibers[current].state = State::block;
  to_main();
}

void warp_barrier(unsigned mask) {
  const unsigned warp = current / 32;
  arrived[warp] |= 1u << (current & 31);
  if ((arrived[warp] & mask) == mask) {
    arrived[warp] = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1u) fibers[warp * 32 + lane].state = State::ready;
    }
    return;
  }
  fibers[current].state = State::warp;
  to_main();
}

uint64_t* warp_slots() { return slots[current / 32]; }

// Every block of the grid, one after the other. seed 0: threads in order; any other: shuffled after every barrier.
const char* run(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned shared_bytes, const std::function<void()>& kernel,
                uint64_t seed) {
  if (threads == 0 || threads > kThreads || threads % 32 != 0) return "threads must be a multiple of 32 up to 1024";
  if (shared_bytes > kShared) return "too much shared memory";
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_y > 65535 || grid_z > 65535) return "the grid is empty or too large";
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kStack * kThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks = static_cast<unsigned char*>(memory);
  }
  body = &kernel;
  blockDim = {threads, 1, 1};
  gridDim = {grid_x, grid_y, grid_z};
  threadIdx = {0, 0, 0};
  paritree_dynamic_shared = shared_memory;
  random_state = seed;
  std::vector<unsigned> order(threads);
  for (unsigned t = 0; t < threads; ++t) order[t] = t;
  for (unsigned z = 0; z < grid_z; ++z) {
    for (unsigned y = 0; y < grid_y; ++y) {
      for (unsigned x = 0; x < grid_x; ++x) {
        blockIdx = {x, y, z};
        std::memset(shared_memory, 0xff, shared_bytes + kGuard);
        if (const char* problem = run_block(threads, order, seed != 0)) return problem;
        for (std::size_t i = 0; i < kGuard; ++i) {
          if (shared_memory[shared_bytes + i] != 0xff) return "dynamic shared memory is written past its end";
        }
      }
    }
  }
  return nullptr;
}

template <class... Args, std::size_t... I>
void unpack(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Args>>*>(args[I])...);
}
template <class... Args>
void call(void (*kernel)(Args...), void** args) {
  unpack(kernel, args, std::index_sequence_for<Args...>{});
}
template <class... Args>
constexpr int arity(void (*)(Args...)) {
  return static_cast<int>(sizeof...(Args));
}

struct Entry {
  const char* name;
  void (*run)(void**);
  int arguments;
};
#define PARITREE_ENTRY(kernel) {#kernel, [](void** args) { call(kernel, args); }, arity(kernel)},
const Entry entries[] = {PARITREE_KERNEL_LIST(PARITREE_ENTRY)};

}  // namespace paritree_emulator

// 0, or 1 with a message
extern "C" int paritree_emulate(const char* name, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads, unsigned shared_bytes,
                                void** args, int arguments, uint64_t seed, char* message, unsigned message_bytes) {
  using namespace paritree_emulator;
  const Entry* found = nullptr;
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, name) == 0) found = &entry;
  }
  const char* problem = nullptr;
  if (found == nullptr) problem = "there is no such kernel";
  else if (found->arguments != arguments) problem = "the number of arguments differs";
  else problem = run(grid_x, grid_y, grid_z, threads, shared_bytes, [&] { found->run(args); }, seed);
  if (problem == nullptr) return 0;
  std::snprintf(message, message_bytes, "%s: %s", name, problem);
  return 1;
}
