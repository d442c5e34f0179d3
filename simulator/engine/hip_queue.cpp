// Streams, events and graphs of the HIP stand-in.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "hip_state.h"

namespace sim::hip {
namespace {

// Work of one stream, in order, on a host thread of its own.
class Queue {
 public:
  void add(Work work) {
    std::lock_guard guard(lock_);
    work_.push_back(std::move(work));
    if (!started_) std::thread([this] { serve(); }).detach();
    started_ = true;
    changed_.notify_all();
  }
  hipError_t drain() {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [&] { return work_.empty() && !busy_; });
    hipError_t error = error_;
    error_ = hipSuccess;
    return error;
  }
  bool idle() {
    std::lock_guard guard(lock_);
    return work_.empty() && !busy_;
  }

 private:
  void serve() {
    std::unique_lock guard(lock_);
    for (;;) {
      changed_.wait(guard, [&] { return !work_.empty(); });
      Work work = std::move(work_.front());
      work_.pop_front();
      busy_ = true;
      guard.unlock();
      hipError_t error = work();
      guard.lock();
      busy_ = false;
      if (error) error_ = error;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  bool busy_ = false, started_ = false;
  hipError_t error_ = hipSuccess;
};

struct Graph {
  std::vector<Work> work;
};

struct Stream {
  int device = 0;
  Queue queue;
  std::shared_ptr<Graph> captured;  // not null while the stream is captured
};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  uint64_t recorded = 0, completed = 0;
  std::chrono::steady_clock::time_point time;
  std::shared_ptr<Graph> captured;

  void complete(uint64_t n) {
    std::lock_guard guard(lock);
    completed = std::max(completed, n);
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait(uint64_t n) {
    std::unique_lock guard(lock);
    changed.wait(guard, [&] { return completed >= n; });
  }
};
using EventPtr = std::shared_ptr<Event>;

struct All {
  std::mutex lock;
  std::set<Stream*> streams;
  std::map<std::pair<int, std::thread::id>, Queue*> null;  // by device and host thread; kept
};
All& all() {
  static All* instance = new All;  // queues outlive the program's own destructors
  return *instance;
}

bool isNull(hipStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }  // or legacy, per thread

Stream* streamOf(hipStream_t s) {
  std::lock_guard guard(all().lock);
  auto* stream = reinterpret_cast<Stream*>(s);
  return all().streams.count(stream) ? stream : nullptr;
}

Queue* nullQueue(int device, bool make) {
  std::lock_guard guard(all().lock);
  auto key = std::pair(device, std::this_thread::get_id());
  auto it = all().null.find(key);
  if (it != all().null.end()) return it->second;
  return make ? all().null[key] = new Queue : nullptr;
}

hipError_t drainAll(const std::vector<Queue*>& queues) {
  hipError_t error = hipSuccess;
  for (Queue* q : queues) {
    if (hipError_t its = q->drain()) error = its;
  }
  return result(error);
}

std::vector<Queue*> queuesOf(int device, bool ofOthers) {
  std::lock_guard guard(all().lock);
  std::vector<Queue*> out;
  for (Stream* s : all().streams) {
    if (s->device == device) out.push_back(&s->queue);
  }
  for (auto& [key, queue] : all().null) {
    bool own = key.second == std::this_thread::get_id();
    if (key.first == device && (own || ofOthers)) out.push_back(queue);
  }
  return out;
}

EventPtr& eventOf(hipEvent_t e) { return *reinterpret_cast<EventPtr*>(e); }

}  // namespace

hipError_t submit(hipStream_t s, Work work) {
  if (!isNull(s)) {
    Stream* stream = streamOf(s);
    if (!stream) return result(hipErrorInvalidHandle);
    if (stream->captured) {
      stream->captured->work.push_back(std::move(work));
    } else {
      stream->queue.add(std::move(work));
    }
    return hipSuccess;
  }
  if (!runtime().several) {
    if (hipError_t error = drainOwn()) return error;  // the null stream waits for the others
    return result(work());
  }
  nullQueue(currentDevice(), true)->add(std::move(work));
  return hipSuccess;
}

hipError_t drain(hipStream_t s) {
  if (isNull(s)) return drainOwn();
  Stream* stream = streamOf(s);
  return stream ? result(stream->queue.drain()) : result(hipErrorInvalidHandle);
}

hipError_t drainOwn() { return drainAll(queuesOf(currentDevice(), false)); }

hipError_t drainDevice(int device) { return drainAll(queuesOf(device, true)); }

}  // namespace sim::hip

using namespace sim::hip;

extern "C" {

// ---- streams ------------------------------------------------------------------------------------

hipError_t hipStreamCreate(hipStream_t* s) {
  auto* stream = new Stream;
  stream->device = currentDevice();
  std::lock_guard guard(all().lock);
  all().streams.insert(stream);
  *s = reinterpret_cast<hipStream_t>(stream);
  return hipSuccess;
}
hipError_t hipStreamCreateWithFlags(hipStream_t* s, unsigned) { return hipStreamCreate(s); }
hipError_t hipStreamCreateWithPriority(hipStream_t* s, unsigned, int) { return hipStreamCreate(s); }
hipError_t hipStreamDestroy(hipStream_t s) {
  hipError_t error = drain(s);
  std::lock_guard guard(all().lock);
  all().streams.erase(reinterpret_cast<Stream*>(s));  // its thread sleeps on: it is not deleted
  return error;
}
hipError_t hipStreamSynchronize(hipStream_t s) { return drain(s); }
hipError_t hipStreamQuery(hipStream_t s) {
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  return !stream || stream->queue.idle() ? hipSuccess : hipErrorNotReady;
}
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return hipSuccess;
}

// ---- events -------------------------------------------------------------------------------------

hipError_t hipEventCreate(hipEvent_t* e) {
  *e = reinterpret_cast<hipEvent_t>(new EventPtr(std::make_shared<Event>()));
  return hipSuccess;
}
hipError_t hipEventCreateWithFlags(hipEvent_t* e, unsigned) { return hipEventCreate(e); }
hipError_t hipEventDestroy(hipEvent_t e) {
  delete reinterpret_cast<EventPtr*>(e);
  return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t e, hipStream_t s) {
  EventPtr event = eventOf(e);
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  if (stream && stream->captured) {
    event->captured = stream->captured;  // its place in the graph
    return hipSuccess;
  }
  uint64_t n;
  {
    std::lock_guard guard(event->lock);
    event->captured = nullptr;
    n = ++event->recorded;
  }
  return submit(s, [event, n] {
    event->complete(n);
    return hipSuccess;
  });
}
hipError_t hipStreamWaitEvent(hipStream_t s, hipEvent_t e, unsigned) {
  EventPtr event = eventOf(e);
  if (event->captured) {  // the stream joins the capture: its work comes behind what is there
    if (Stream* stream = isNull(s) ? nullptr : streamOf(s)) stream->captured = event->captured;
    return hipSuccess;
  }
  uint64_t n = event->recorded;
  return submit(s, [event, n] {
    event->wait(n);
    return hipSuccess;
  });
}
hipError_t hipEventSynchronize(hipEvent_t e) {
  EventPtr event = eventOf(e);
  event->wait(event->recorded);
  return hipSuccess;
}
hipError_t hipEventQuery(hipEvent_t e) {
  EventPtr event = eventOf(e);
  std::lock_guard guard(event->lock);
  return event->completed >= event->recorded ? hipSuccess : hipErrorNotReady;
}
hipError_t hipEventElapsedTime(float* ms, hipEvent_t a, hipEvent_t b) {
  auto elapsed = eventOf(b)->time - eventOf(a)->time;
  *ms = std::chrono::duration<float, std::milli>(elapsed).count();
  return hipSuccess;
}

// ---- graphs: what was captured, in the order of its calls ---------------------------------------

hipError_t hipStreamBeginCapture(hipStream_t s, hipStreamCaptureMode) {
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  if (!stream || stream->captured) return result(hipErrorInvalidValue);
  stream->captured = std::make_shared<Graph>();
  return hipSuccess;
}
hipError_t hipStreamEndCapture(hipStream_t s, hipGraph_t* graph) {
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  if (!stream || !stream->captured) return result(hipErrorInvalidValue);
  std::shared_ptr<Graph> captured = stream->captured;
  {
    std::lock_guard guard(all().lock);
    for (Stream* other : all().streams) {
      if (other->captured == captured) other->captured = nullptr;
    }
  }
  *graph = reinterpret_cast<hipGraph_t>(new std::shared_ptr<Graph>(captured));
  return hipSuccess;
}
hipError_t hipStreamIsCapturing(hipStream_t s, hipStreamCaptureStatus* status) {
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  *status = stream && stream->captured ? hipStreamCaptureStatusActive : hipStreamCaptureStatusNone;
  return hipSuccess;
}
hipError_t hipGraphInstantiate(hipGraphExec_t* executable, hipGraph_t graph, hipGraphNode_t*, char*,
                               size_t) {
  auto& captured = *reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  *executable = reinterpret_cast<hipGraphExec_t>(new std::shared_ptr<Graph>(captured));
  return hipSuccess;
}
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable, hipGraph_t graph,
                                        unsigned long long) {
  return hipGraphInstantiate(executable, graph, nullptr, nullptr, 0);
}
hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t s) {
  std::shared_ptr<Graph> graph = *reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  return submit(s, [graph] {
    for (const Work& work : graph->work) {
      if (hipError_t error = work()) return error;
    }
    return hipSuccess;
  });
}
hipError_t hipGraphDestroy(hipGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  return hipSuccess;
}
hipError_t hipGraphExecDestroy(hipGraphExec_t executable) {
  return hipGraphDestroy(reinterpret_cast<hipGraph_t>(executable));
}

}  // extern "C"
