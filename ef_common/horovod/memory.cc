// Collectives on plain memory, for a process whose framework is not to see them: numpy arrays, mostly.
//
// Horovod's own functions take the tensors of a framework. Under TensorFlow they are operations of a graph, which
// allocate, copy, and hold a thread each. These begin at once, work in place, and are waited for without Python's lock.
//
// Horovod lets the members agree on what comes next, since a graph computes its gradients in another order in each of
// them. Our sums come in the same order everywhere, so they need no agreement: they take Horovod's connections (those
// of the global Gloo context, which Horovod itself does not use once it is initialized), one sum after the other.

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common.h"
#include "gloo/allreduce.h"
#include "gloo/context.h"
#include "gloo/math.h"
#include "gloo/types.h"
#include "operations.h"

namespace horovod {
namespace common {

// In operations.cc.
std::shared_ptr<gloo::Context> GlobalGlooContext();

namespace {

// Memory of the caller, who keeps it until the operation is over.
class Memory : public Tensor {
public:
  Memory(void* data, DataType type, int64_t count, int64_t item_bytes)
      : data_(data), type_(type), bytes_(count * item_bytes) {
    shape_.AddDim(count);
  }
  const DataType dtype() const override { return type_; }
  const TensorShape shape() const override { return shape_; }
  const void* data() const override { return data_; }
  int64_t size() const override { return bytes_; }

private:
  void* data_;
  DataType type_;
  TensorShape shape_;
  int64_t bytes_;
};

class OwnBuffer : public PersistentBuffer {
public:
  explicit OwnBuffer(int64_t size) : bytes_(size) {}
  const void* AccessData(std::shared_ptr<OpContext>) const override { return bytes_.data(); }

private:
  std::vector<char> bytes_;
};

// One operation; shared by the caller, who waits, and Horovod's thread, which ends it.
struct Operation {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string error;
  std::vector<char> output;

  void End(const Status& status) {
    std::lock_guard<std::mutex> guard(mutex);
    if (!status.ok()) {
      error = status.reason().empty() ? "unknown error" : status.reason();
    }
    done = true;
    changed.notify_all();
  }
};

class MemoryContext : public OpContext {
public:
  explicit MemoryContext(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  Status AllocatePersistent(int64_t size, std::shared_ptr<PersistentBuffer>* tensor) override {
    *tensor = std::make_shared<OwnBuffer>(size);
    return Status::OK();
  }

  Status AllocateOutput(TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>* = nullptr) override {
    operation_->output.resize(shape.num_elements());
    *tensor = std::make_shared<Memory>(operation_->output.data(), HOROVOD_UINT8, shape.num_elements(), 1);
    return Status::OK();
  }

  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override {
    return Status::PreconditionError("a process cannot leave the others' operations on memory");
  }

  Framework framework() const override { return Framework::PYTORCH; }

private:
  std::shared_ptr<Operation> operation_;
};

using Handle = std::shared_ptr<Operation>;
using Add = void (*)(void*, const void*, const void*, size_t);

// So much is sent from everybody to everybody, in one round; a ring takes twice as many rounds as there are members.
constexpr int64_t kDirectBytes = 1 << 20;
// A slow member is no failure, and the end of a dead one's connection ends the operation.
constexpr std::chrono::hours kTimeout(6);

Add AddOf(DataType type) {
  switch (type) {
  case HOROVOD_UINT8:
    return &gloo::sum<uint8_t>;
  case HOROVOD_INT8:
    return &gloo::sum<int8_t>;
  case HOROVOD_UINT16:
    return &gloo::sum<uint16_t>;
  case HOROVOD_INT16:
    return &gloo::sum<int16_t>;
  case HOROVOD_INT32:
    return &gloo::sum<int32_t>;
  case HOROVOD_INT64:
    return &gloo::sum<int64_t>;
  case HOROVOD_FLOAT16:
    return &gloo::sum<gloo::float16>;
  case HOROVOD_FLOAT32:
    return &gloo::sum<float>;
  case HOROVOD_FLOAT64:
    return &gloo::sum<double>;
  case HOROVOD_BOOL:
    return &gloo::sum<bool>;
  default:
    throw std::logic_error("this type cannot be summed: " + DataType_Name(type));
  }
}

struct Sum {
  Handle operation;
  char* data;
  size_t count;
  size_t item_bytes;
  Add add;
};

// The sums of one group: a thread that makes one after the other, in the order in which they came.
class Sums {
public:
  explicit Sums(std::shared_ptr<gloo::Context> context) : context_(std::move(context)) {
    thread_ = std::thread([this] { Work(); });
  }

  // The connections must be down, or nothing be under way.
  ~Sums() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
    for (auto& sum : queue_) {
      sum.operation->End(SHUT_DOWN_ERROR);
    }
  }

  void Begin(Sum sum) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      queue_.push_back(std::move(sum));
    }
    changed_.notify_all();
  }

private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
      if (ended_) {
        return;
      }
      Sum sum = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      sum.operation->End(Make(sum));
      lock.lock();
    }
  }

  // Once one has failed, no other begins: the members would not be at the same one any more.
  Status Make(const Sum& sum) {
    if (!failed_.ok()) {
      return failed_;
    }
    try {
      ++number_;
      if (context_->size == 1) {
        return Status::OK();
      }
      if (static_cast<int64_t>(sum.count * sum.item_bytes * context_->size) <= kDirectBytes) {
        Directly(sum);
      } else {
        InRing(sum);
      }
    } catch (const std::exception& error) {
      failed_ = Status::UnknownError(error.what());
    }
    return failed_;
  }

  // Everybody's numbers to everybody, added up in rank order: all get the same bits.
  void Directly(const Sum& sum) {
    const size_t bytes = sum.count * sum.item_bytes;
    const auto slot = gloo::Slot::build(gloo::kAllreduceSlotPrefix, number_);
    received_.resize(bytes * context_->size);
    auto out = context_->createUnboundBuffer(sum.data, bytes);
    auto in = context_->createUnboundBuffer(received_.data(), received_.size());
    for (int step = 1; step < context_->size; step++) {
      const int source = (context_->rank + context_->size - step) % context_->size;
      in->recv(source, slot, source * bytes, bytes);
      out->send((context_->rank + step) % context_->size, slot, 0, bytes);
    }
    for (int step = 1; step < context_->size; step++) {
      in->waitRecv(kTimeout);
    }
    for (int step = 1; step < context_->size; step++) {
      out->waitSend(kTimeout);
    }
    std::memcpy(received_.data() + context_->rank * bytes, sum.data, bytes);
    sum.add(sum.data, received_.data(), received_.data() + bytes, sum.count);
    for (int rank = 2; rank < context_->size; rank++) {
      sum.add(sum.data, sum.data, received_.data() + rank * bytes, sum.count);
    }
  }

  void InRing(const Sum& sum) {
    gloo::AllreduceOptions options(context_);
    if (sum.item_bytes == 1) {
      options.setOutput(reinterpret_cast<uint8_t*>(sum.data), sum.count);
    } else if (sum.item_bytes == 2) {
      options.setOutput(reinterpret_cast<uint16_t*>(sum.data), sum.count);
    } else if (sum.item_bytes == 4) {
      options.setOutput(reinterpret_cast<uint32_t*>(sum.data), sum.count);
    } else {
      options.setOutput(reinterpret_cast<uint64_t*>(sum.data), sum.count);
    }
    options.setReduceFunction(gloo::AllreduceOptions::Func(sum.add));
    options.setTag(number_);
    options.setTimeout(kTimeout);
    gloo::allreduce(options);
  }

  std::shared_ptr<gloo::Context> context_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Sum> queue_;
  bool ended_ = false;
  uint32_t number_ = 0;
  Status failed_ = Status::OK();
  std::vector<char> received_;
};

std::mutex sums_mutex;
std::unique_ptr<Sums> sums;

Handle* BeginSum(void* data, int64_t count, int type, int64_t item_bytes) {
  auto operation = std::make_shared<Operation>();
  try {
    std::lock_guard<std::mutex> guard(sums_mutex);
    if (!sums) {
      throw std::runtime_error(SHUT_DOWN_ERROR.reason());
    }
    sums->Begin({operation, static_cast<char*>(data), static_cast<size_t>(count), static_cast<size_t>(item_bytes),
                 AddOf(static_cast<DataType>(type))});
  } catch (const std::exception& error) {
    operation->End(Status::UnknownError(error.what()));
  }
  return new Handle(operation);
}

Handle* BeginGather(const char* name, void* data, int64_t count) {
  auto operation = std::make_shared<Operation>();
  auto end = [operation](const Status& status) { operation->End(status); };
  Status status;
  try {
    status = CheckInitialized();
    if (status.ok()) {
      auto context = std::make_shared<MemoryContext>(operation);
      auto memory = std::make_shared<Memory>(data, HOROVOD_UINT8, count, 1);
      status = EnqueueTensorAllgather(context, memory, ReadyEventList(), name, CPU_DEVICE_ID, end);
    }
  } catch (const std::exception& error) {
    status = Status::UnknownError(error.what());
  }
  if (!status.ok()) {
    operation->End(status);
  }
  return new Handle(operation);
}

} // namespace
} // namespace common
} // namespace horovod

extern "C" {

using horovod::common::Handle;

// To be called after `horovod_init`.
void horovod_memory_open() {
  std::lock_guard<std::mutex> guard(horovod::common::sums_mutex);
  horovod::common::sums = std::make_unique<horovod::common::Sums>(horovod::common::GlobalGlooContext());
}

// To be called before `horovod_shutdown`, with all connections down: nothing is in flight when this returns.
void horovod_memory_close() {
  std::unique_ptr<horovod::common::Sums> closed;
  std::lock_guard<std::mutex> guard(horovod::common::sums_mutex);
  closed = std::move(horovod::common::sums);
}

// Sum `count` items over the members, in place. The memory must stay until the operation is over. The members must
// begin their sums in the same order.
void* horovod_memory_sum(void* data, int64_t count, int type, int64_t item_bytes) {
  return horovod::common::BeginSum(data, count, type, item_bytes);
}

// Bring everybody's bytes, in rank order.
void* horovod_memory_gather(const char* name, void* data, int64_t count) {
  return horovod::common::BeginGather(name, data, count);
}

// Whether it is over, after this time at most.
bool horovod_memory_wait(void* handle, double timeout_s) {
  auto& operation = **static_cast<Handle*>(handle);
  std::unique_lock<std::mutex> lock(operation.mutex);
  return operation.changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return operation.done; });
}

// What went wrong; empty if nothing has. It is to be called when the operation is over, as are the next two.
const char* horovod_memory_error(void* handle) { return (*static_cast<Handle*>(handle))->error.c_str(); }

int64_t horovod_memory_size(void* handle) { return (*static_cast<Handle*>(handle))->output.size(); }

const void* horovod_memory_output(void* handle) { return (*static_cast<Handle*>(handle))->output.data(); }

// The caller's last word; Horovod's thread may still end the operation.
void horovod_memory_release(void* handle) { delete static_cast<Handle*>(handle); }

} // extern "C"
