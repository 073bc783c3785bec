// Collectives on plain memory, for a process whose framework is not to see them: numpy arrays, mostly.
//
// Horovod's own functions take the tensors of a framework. Under TensorFlow they are operations of a graph, which
// allocate, copy, and hold a thread each. These begin at once, work in place, and are waited for without Python's lock.

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.h"
#include "operations.h"

namespace horovod {
namespace common {
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

Handle* Begin(const char* name, void* data, int64_t count, int type, int64_t item_bytes, bool gather) {
  auto operation = std::make_shared<Operation>();
  auto end = [operation](const Status& status) { operation->End(status); };
  Status status;
  try {
    status = CheckInitialized();
    if (status.ok()) {
      auto context = std::make_shared<MemoryContext>(operation);
      auto memory = std::make_shared<Memory>(data, static_cast<DataType>(type), count, item_bytes);
      status = gather ? EnqueueTensorAllgather(context, memory, ReadyEventList(), name, CPU_DEVICE_ID, end)
                      : EnqueueTensorAllreduce(context, memory, memory, ReadyEventList(), name, CPU_DEVICE_ID, end);
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

using horovod::common::Begin;
using horovod::common::Handle;

// Sum `count` items over the members, in place. The memory must stay until the operation is over.
void* horovod_memory_sum(const char* name, void* data, int64_t count, int type, int64_t item_bytes) {
  return Begin(name, data, count, type, item_bytes, false);
}

// Bring everybody's bytes, in rank order.
void* horovod_memory_gather(const char* name, void* data, int64_t count) {
  return Begin(name, data, count, horovod::common::HOROVOD_UINT8, 1, true);
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
