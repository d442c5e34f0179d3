// The work of the streams of a HIP program, and the one thread that plays it.
//
// It does copies as they come, and kernels of different streams beside each other, their waves in
// the order of the seed. It plays while a host thread waits for a stream, so that what a host
// thread has launched until then meets the same orders in every run; and it plays on by itself when
// the host has been silent for a while, as one is that waits for memory to change.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "hip_state.h"

namespace sim::hip {

constexpr std::chrono::milliseconds kSilence{200};
constexpr uint32_t kTurns = 64;  // until the player looks for what has come

// Launches that ended before, by their numbers in an interleaving: of each stream the last.
struct Past {
  uint64_t of = 0;  // which interleaving
  std::set<uint32_t> launches;

  void join(const Past& other) {
    if (other.of > of) launches.clear(), of = other.of;
    if (other.of == of) launches.insert(other.launches.begin(), other.launches.end());
  }
};

struct Graph;

struct Event {
  uint64_t recorded = 0, completed = 0;
  std::chrono::steady_clock::time_point time;
  Past past;
  std::shared_ptr<Graph> captured;
};
using EventPtr = std::shared_ptr<Event>;

// One thing of a stream's work: something to do, a kernel, or an event to complete or to wait for.
struct Item {
  Work work;
  std::shared_ptr<KernelCall> kernel;
  EventPtr event;
  bool waits = false;   // for the event
  uint64_t number = 0;  // of the event's recordings
  Past past;            // what the host knew of when it gave this work
};

struct Graph {
  std::vector<Item> items;
};

struct Queue {
  int device = 0;
  uint32_t number = 0;
  std::deque<Item> items;
  bool busy = false;
  hipError_t error = hipSuccess;
  Past past;

  bool idle() const { return items.empty() && !busy; }
};

// A host thread that waits.
struct Waiter {
  std::function<bool()> over;
  bool met = false;
};

class Player {
 public:
  Queue* newQueue(int device) {
    std::lock_guard guard(lock_);
    return make(device);
  }

  // The null stream of a device for this host thread; null when it has none and `wanted` is false.
  Queue* nullQueue(int device, bool wanted) {
    std::lock_guard guard(lock_);
    auto key = std::pair(device, std::this_thread::get_id());
    auto it = null_.find(key);
    if (it != null_.end()) return it->second;
    return wanted ? null_[key] = make(device) : nullptr;
  }

  std::vector<Queue*> nullQueues(int device, bool ofOthers) {
    std::lock_guard guard(lock_);
    std::vector<Queue*> out;
    for (auto& [key, queue] : null_) {
      bool own = key.second == std::this_thread::get_id();
      if (key.first == device && (own || ofOthers)) out.push_back(queue);
    }
    return out;
  }

  // `after`: streams whose work until now comes first.
  void add(Queue& queue, Item item, const std::vector<Queue*>& after) {
    std::lock_guard guard(lock_);
    item.past = host_;
    for (Queue* other : after) {
      if (other == &queue) continue;
      if (other->idle()) {
        item.past.join(other->past);
        continue;
      }
      Item ends, waits;
      ends.event = waits.event = std::make_shared<Event>();
      ends.number = waits.number = ends.event->recorded = 1;
      waits.waits = true;
      other->items.push_back(std::move(ends));
      queue.items.push_back(std::move(waits));
    }
    if (item.event && !item.waits) item.number = ++item.event->recorded;
    if (item.event && item.waits) item.number = item.event->recorded;
    queue.items.push_back(std::move(item));
    ++given_;
    if (!started_) std::thread([this] { play(); }).detach();
    started_ = true;
    changed_.notify_all();
  }

  // Of the null stream of a program that has no other: now, by this thread.
  hipError_t doNow(Item item) {
    if (item.event && item.waits) return waitFor(item.event);
    if (item.kernel) return runAlone(*item.kernel);
    if (item.work) return item.work();
    std::lock_guard guard(lock_);
    item.number = ++item.event->recorded;
    complete(item, host_);
    return hipSuccess;
  }

  hipError_t waitFor(const std::vector<Queue*>& queues) {
    std::unique_lock guard(lock_);
    wait(guard, [&] {
      return std::all_of(queues.begin(), queues.end(), [](Queue* q) { return q->idle(); });
    });
    hipError_t error = hipSuccess;
    for (Queue* q : queues) {
      host_.join(q->past);
      if (q->error) error = q->error;
      q->error = hipSuccess;
    }
    return error;
  }

  hipError_t waitFor(const EventPtr& event) {
    std::unique_lock guard(lock_);
    uint64_t number = event->recorded;
    wait(guard, [&] { return event->completed >= number; });
    host_.join(event->past);
    return hipSuccess;
  }

  // Is it over? When not, the player goes on: the host may ask until it is.
  bool over(const std::function<bool()>& question) {
    std::lock_guard guard(lock_);
    if (question()) return true;
    unasked_ = true;
    changed_.notify_all();
    return false;
  }

 private:
  Queue* make(int device) {
    auto* queue = new Queue;  // kept: the player may look at it
    queue->device = device;
    queue->number = queues_.size();
    queues_.push_back(queue);
    return queue;
  }

  void wait(std::unique_lock<std::mutex>& guard, const std::function<bool()>& over) {
    if (over()) return;
    Waiter waiter{over};
    waiters_.push_back(&waiter);
    changed_.notify_all();
    met_.wait(guard, [&] { return waiter.met; });
  }

  // Something is done: whom of those that wait does that help?
  void tell() {
    std::erase_if(waiters_, [](Waiter* w) { return w->met = w->over(); });
    met_.notify_all();
  }

  void complete(Item& item, const Past& past) {
    Event& event = *item.event;
    event.completed = std::max(event.completed, item.number);
    event.time = std::chrono::steady_clock::now();
    event.past = past;
  }

  void play() {
    std::unique_lock guard(lock_);
    for (;;) {
      changed_.wait(guard, [&] { return toDo(); });
      if (waiters_.empty() && !unasked_) {
        uint64_t given = given_;
        bool spoke = changed_.wait_for(
            guard, kSilence, [&] { return !waiters_.empty() || unasked_ || given_ != given; });
        if (!spoke) unasked_ = true;
        continue;
      }
      bool did = false;
      for (size_t n = 0; n < queues_.size(); ++n) {
        while (start(*queues_[n], guard)) did = true;
      }
      if (!running_.empty()) {
        turns(guard);
      } else if (!did) {
        changed_.wait_for(guard, kSilence);  // for an event, or for what another thread runs
      }
    }
  }

  bool toDo() const {
    return std::any_of(queues_.begin(), queues_.end(), [](Queue* q) { return !q->idle(); });
  }

  // Starts what a stream has next, and says whether that was possible.
  bool start(Queue& q, std::unique_lock<std::mutex>& guard) {
    if (q.busy || q.items.empty()) return false;
    if (q.items.front().waits && q.items.front().event->completed < q.items.front().number) {
      return false;
    }
    Item item = std::move(q.items.front());
    q.items.pop_front();
    q.past.join(item.past);
    q.busy = true;
    if (item.kernel) {
      begin(q, item.kernel);
      return true;
    }
    if (item.event && item.waits) {
      q.past.join(item.event->past);
    } else if (item.event) {
      complete(item, q.past);
    } else {
      guard.unlock();
      hipError_t error = item.work();
      guard.lock();
      if (error) q.error = error;
    }
    q.busy = false;
    rest();
    return true;
  }

  void begin(Queue& q, const std::shared_ptr<KernelCall>& call) {
    SimOptions options;
    {
      Lock runtimeGuard(runtime().lock);
      options = runtime().options;
    }
    // The only stream needs no order, and has all cores; the cycle model plays a launch by itself.
    if (queues_.size() == 1 || options.cycles) {
      ++alone_;
      std::thread([this, &q, call] {
        hipError_t error = runAlone(*call);
        std::lock_guard again(lock_);
        --alone_;
        end(q, error);
        changed_.notify_all();
      }).detach();
      return;
    }
    if (!interleaving_) {
      interleaving_ = sim_interleave(options.seed);
      ++interleavings_;
    }
    const dim3 &grid = call->grid, &block = call->block;
    SimCall launch{call->function.object,
                   call->function.name.c_str(),
                   {grid.x, grid.y, grid.z},
                   {block.x, block.y, block.z},
                   static_cast<uint32_t>(call->lds),
                   q.number,
                   static_cast<uint32_t>(q.device),
                   call->segment.data(),
                   call->segment.size()};
    std::vector<SimBuffer> buffers = knownBuffers();
    std::vector<uint32_t> before;
    if (q.past.of == interleavings_) before.assign(q.past.launches.begin(), q.past.launches.end());
    int64_t number = sim_begin(interleaving_, &launch, buffers.data(), buffers.size(), &options,
                               before.data(), before.size());
    if (number < 0) {
      end(q, keepResult(nullptr));
    } else {
      running_[number] = &q;
    }
  }

  void turns(std::unique_lock<std::mutex>& guard) {
    guard.unlock();
    const char* text = nullptr;
    int64_t number = sim_turns(interleaving_, kTurns, &text);
    hipError_t error = number < 0 ? hipSuccess : keepResult(text);
    guard.lock();
    if (number < 0) return;
    Queue& q = *running_.extract(number).mapped();
    q.past = {interleavings_, {static_cast<uint32_t>(number)}};
    end(q, error);
  }

  void end(Queue& q, hipError_t error) {
    q.busy = false;
    if (error) q.error = error;
    rest();
  }

  // When nothing is left, what comes next meets nothing of what was.
  void rest() {
    if (!toDo()) {
      unasked_ = false;
      if (interleaving_) sim_end(interleaving_);
      interleaving_ = nullptr;
    }
    tell();
  }

  std::mutex lock_;
  std::condition_variable changed_, met_;
  std::vector<Queue*> queues_;
  std::map<std::pair<int, std::thread::id>, Queue*> null_;
  std::vector<Waiter*> waiters_;
  std::map<int64_t, Queue*> running_;
  SimInterleaving* interleaving_ = nullptr;
  uint64_t interleavings_ = 0, given_ = 0;
  Past host_;
  int alone_ = 0;  // launches that threads of their own run
  bool started_ = false;
  bool unasked_ = false;  // it plays although nobody waits, until nothing is left
};

}  // namespace sim::hip
