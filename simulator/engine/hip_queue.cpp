// Streams, events and graphs of the HIP stand-in.
#include "hip_player.h"

namespace sim::hip {
namespace {

struct Stream {
  Queue* queue;
  bool blocking;                    // it and the null stream wait for one another
  std::shared_ptr<Graph> captured;  // not null while the stream is captured
};

Player& player() {
  static Player* instance = new Player;  // it outlives the program's own destructors
  return *instance;
}

struct All {
  std::mutex lock;
  std::set<Stream*> streams;
};
All& all() {
  static All* instance = new All;
  return *instance;
}

bool isNull(hipStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }  // or legacy, per thread

Stream* streamOf(hipStream_t s) {
  std::lock_guard guard(all().lock);
  auto* stream = reinterpret_cast<Stream*>(s);
  return all().streams.count(stream) ? stream : nullptr;
}

std::vector<Queue*> queuesOf(int device, bool ofOthers) {
  std::vector<Queue*> out = player().nullQueues(device, ofOthers);
  std::lock_guard guard(all().lock);
  for (Stream* s : all().streams) {
    if (s->queue->device == device) out.push_back(s->queue);
  }
  return out;
}

EventPtr& eventOf(hipEvent_t e) { return *reinterpret_cast<EventPtr*>(e); }

hipError_t give(hipStream_t s, Item item) {
  if (!isNull(s)) {
    Stream* stream = streamOf(s);
    if (!stream) return result(hipErrorInvalidHandle);
    if (stream->captured) {
      stream->captured->items.push_back(std::move(item));
    } else {
      std::vector<Queue*> after;
      Queue* null = player().nullQueue(stream->queue->device, false);
      if (stream->blocking && null) after.push_back(null);
      player().add(*stream->queue, std::move(item), after);
    }
    return hipSuccess;
  }
  if (!runtime().several) {
    if (hipError_t error = drainOwn()) return error;  // the null stream waits for the others
    return result(player().doNow(std::move(item)));
  }
  std::vector<Queue*> after;
  {
    std::lock_guard guard(all().lock);
    for (Stream* stream : all().streams) {
      if (stream->blocking && stream->queue->device == currentDevice()) {
        after.push_back(stream->queue);
      }
    }
  }
  player().add(*player().nullQueue(currentDevice(), true), std::move(item), after);
  return hipSuccess;
}

}  // namespace

hipError_t submit(hipStream_t s, Work work) {
  Item item;
  item.work = std::move(work);
  return give(s, std::move(item));
}

hipError_t submit(hipStream_t s, KernelCall call) {
  Item item;
  item.kernel = std::make_shared<KernelCall>(std::move(call));
  return give(s, std::move(item));
}

hipError_t drain(hipStream_t s) {
  if (isNull(s)) return drainOwn();
  Stream* stream = streamOf(s);
  return stream ? result(player().waitFor({stream->queue})) : result(hipErrorInvalidHandle);
}

hipError_t drainOwn() { return result(player().waitFor(queuesOf(currentDevice(), false))); }

hipError_t drainDevice(int device) { return result(player().waitFor(queuesOf(device, true))); }

}  // namespace sim::hip

using namespace sim::hip;

extern "C" {

// ---- streams ------------------------------------------------------------------------------------

hipError_t hipStreamCreateWithFlags(hipStream_t* s, unsigned flags) {
  bool blocking = !(flags & hipStreamNonBlocking);
  auto* stream = new Stream{player().newQueue(currentDevice()), blocking, nullptr};
  std::lock_guard guard(all().lock);
  all().streams.insert(stream);
  *s = reinterpret_cast<hipStream_t>(stream);
  return hipSuccess;
}
hipError_t hipStreamCreate(hipStream_t* s) { return hipStreamCreateWithFlags(s, 0); }
hipError_t hipStreamCreateWithPriority(hipStream_t* s, unsigned flags, int) {
  return hipStreamCreateWithFlags(s, flags);
}
hipError_t hipStreamDestroy(hipStream_t s) {
  hipError_t error = drain(s);
  std::lock_guard guard(all().lock);
  all().streams.erase(reinterpret_cast<Stream*>(s));
  return error;
}
hipError_t hipStreamSynchronize(hipStream_t s) { return drain(s); }
hipError_t hipStreamQuery(hipStream_t s) {
  Stream* stream = isNull(s) ? nullptr : streamOf(s);
  if (!stream) return hipSuccess;
  return player().over([&] { return stream->queue->idle(); }) ? hipSuccess : hipErrorNotReady;
}
// Every stream has all compute units.
hipError_t hipExtStreamGetCUMask(hipStream_t, uint32_t words, uint32_t* mask) {
  if (!words || !mask) return result(hipErrorInvalidValue);
  uint32_t units = runtime().gpu->computeUnits;
  for (uint32_t n = 0; n < words; ++n, units -= std::min(units, 32u)) {
    mask[n] = units >= 32 ? ~0u : (1u << units) - 1;
  }
  return hipSuccess;
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
  event->captured = nullptr;
  Item item;
  item.event = event;
  return give(s, std::move(item));
}
hipError_t hipStreamWaitEvent(hipStream_t s, hipEvent_t e, unsigned) {
  EventPtr event = eventOf(e);
  if (event->captured) {  // the stream joins the capture: its work comes behind what is there
    if (Stream* stream = isNull(s) ? nullptr : streamOf(s)) stream->captured = event->captured;
    return hipSuccess;
  }
  Item item;
  item.event = event;
  item.waits = true;
  return give(s, std::move(item));
}
hipError_t hipEventSynchronize(hipEvent_t e) { return player().waitFor(eventOf(e)); }
hipError_t hipEventQuery(hipEvent_t e) {
  EventPtr event = eventOf(e);
  bool over = player().over([&] { return event->completed >= event->recorded; });
  return over ? hipSuccess : hipErrorNotReady;
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
// How many nodes there are; what they are is nobody's to change.
hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count) {
  const Graph& captured = **reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  if (nodes) return result(hipErrorNotSupported);
  *count = captured.items.size();
  return hipSuccess;
}
hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t s) {
  std::shared_ptr<Graph> graph = *reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  for (const Item& item : graph->items) {
    if (hipError_t error = give(s, item)) return error;
  }
  return hipSuccess;
}
hipError_t hipGraphDestroy(hipGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  return hipSuccess;
}
hipError_t hipGraphExecDestroy(hipGraphExec_t executable) {
  return hipGraphDestroy(reinterpret_cast<hipGraph_t>(executable));
}

}  // extern "C"
