"""Patches of Horovod's source, so that it builds and no lost peer ends a process.

A change is a piece of text that occurs once in a file, and what stands there afterwards. Anything else is an error:
the source is not the one that the changes were made for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ef_common.errors import UsageError

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
REVISION = 3
"""Counts the changes. It is the wheel's local version: `0.28.1+elasticflow.3`."""

ADDED = {"horovod/common/memory.cc": "memory.cc"}
"""Files of ours: path in the source → name beside this module."""


@dataclass(frozen=True)
class HostChange:
    """One change of one file.

    Attributes:
        path: File, from the root of the source.
        old: Text that occurs there exactly once.
        new: Text that replaces it.
    """

    path: str
    old: str
    new: str


_PAIR = "third_party/gloo/gloo/transport/tcp/pair.cc"
CHANGES = (
    # torch and TensorFlow have headers in C++20.
    HostChange("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    HostChange("CMakeLists.txt", '"-std=c++11" "-std=c++17" GLOO_CMAKE', '"-std=c++11" "-std=c++20" GLOO_CMAKE'),
    HostChange("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)\\n", "set(CMAKE_CXX_STANDARD 20)\\n"),
    HostChange("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    HostChange("horovod/tensorflow/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)", "set(CMAKE_CXX_STANDARD 20)"),
    # Off by default, and TensorFlow has moved the headers that it needs.
    HostChange(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # A peer that dies while the group is built throws in the background thread, which would end the process.
    HostChange(
        "horovod/common/operations.cc",
        "        std::thread(BackgroundThreadLoop, std::ref(horovod_global));",
        """        std::thread([]() {
          try {
            BackgroundThreadLoop(horovod_global);
          } catch (const std::exception& error) {
            LOG(DEBUG) << "Horovod could not be initialized: " << error.what();
#if HAVE_GLOO
            if (horovod_global.control_operation == LibType::GLOO) {
              horovod_global.process_set_table.Finalize(global_gloo_context,
                                                        SHUT_DOWN_ERROR);
            }
            global_gloo_context.Finalize();
#endif
            horovod_global.initialization_failed = true;
          }
        });""",
    ),
    HostChange(
        "horovod/common/operations.cc",
        """    horovod_global.initialize_flag.clear();
    horovod_global.shut_down = false;
""",
        """    horovod_global.initialize_flag.clear();
    horovod_global.initialization_failed = false;
    horovod_global.shut_down = false;
""",
    ),
    # Two threads that join one thread: only one of them wakes. At exit, Horovod shuts itself down, and so may we.
    HostChange(
        "horovod/common/operations.cc",
        """void horovod_shutdown() {
  if (""",
        """void horovod_shutdown() {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> guard(one_at_a_time);
  if (""",
    ),
    HostChange(
        "CMakeLists.txt",
        '        "${PROJECT_SOURCE_DIR}/horovod/common/message.cc"\n',
        '        "${PROJECT_SOURCE_DIR}/horovod/common/memory.cc"\n'
        '        "${PROJECT_SOURCE_DIR}/horovod/common/message.cc"\n',
    ),
    # Where `memory.cc` finds the connections.
    HostChange(
        "horovod/common/operations.cc",
        """Status CheckInitialized() {
""",
        """#if HAVE_GLOO
std::shared_ptr<gloo::Context> GlobalGlooContext() {
  return global_gloo_context.ctx;
}
#endif

Status CheckInitialized() {
""",
    ),
    # In place, there is nothing to copy.
    HostChange(
        "horovod/common/ops/gloo_operations.cc",
        """    std::memcpy(buffer_data, first_entry.tensor->data(),
                (size_t)first_entry.tensor->size());
    fused_input_data = buffer_data;
""",
        """    if (buffer_data != first_entry.tensor->data()) {
      std::memcpy(buffer_data, first_entry.tensor->data(),
                  (size_t)first_entry.tensor->size());
    }
    fused_input_data = buffer_data;
""",
    ),
    # Horovod's thread looks for work once per cycle, and asks the others each time. Asking a thousand times a second
    # takes a third of a core where nothing is to do. So it looks as soon as something comes, and the cycle can be long.
    HostChange(
        "horovod/common/tensor_queue.h",
        """  void FinalizeTensorQueue(const Status& status);
""",
        """  void FinalizeTensorQueue(const Status& status);

  // Take entries again, after the queue was finalized.
  void Open();

  // Until there are entries, for this time at most.
  void WaitForEntries(std::chrono::steady_clock::duration timeout);

  // Let nobody wait any more.
  void Wake();
""",
    ),
    HostChange(
        "horovod/common/tensor_queue.h",
        """  mutable std::mutex mutex_;
};
""",
        """  mutable std::mutex mutex_;

  std::condition_variable changed_;
  bool open_ = true;
  bool woken_ = false;
};
""",
    ),
    HostChange(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>\n",
    ),
    # What comes after the end would wait for ever: nobody is left to tell it.
    HostChange(
        "horovod/common/tensor_queue.cc",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (tensor_table_.find(e.tensor_name)""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (!open_) {
    return SHUT_DOWN_ERROR;
  }
  if (tensor_table_.find(e.tensor_name)""",
    ),
    HostChange(
        "horovod/common/tensor_queue.cc",
        """  message_queue_.push(std::move(message));
  return Status::OK();
""",
        """  message_queue_.push(std::move(message));
  changed_.notify_all();
  return Status::OK();
""",
    ),
    HostChange(
        "horovod/common/tensor_queue.cc",
        """  std::lock_guard<std::mutex> guard(mutex_);

  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (tensor_table_""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  if (!open_) {
    return SHUT_DOWN_ERROR;
  }

  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (tensor_table_""",
    ),
    HostChange(
        "horovod/common/tensor_queue.cc",
        """    message_queue_.push(std::move(messages[i]));
  }
  return Status::OK();
}
""",
        """    message_queue_.push(std::move(messages[i]));
  }
  changed_.notify_all();
  return Status::OK();
}

void TensorQueue::Open() {
  std::lock_guard<std::mutex> guard(mutex_);
  open_ = true;
  woken_ = false;
}

void TensorQueue::WaitForEntries(std::chrono::steady_clock::duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, timeout, [this] { return woken_ || !tensor_table_.empty(); });
}

void TensorQueue::Wake() {
  std::lock_guard<std::mutex> guard(mutex_);
  woken_ = true;
  changed_.notify_all();
}
""",
    ),
    HostChange(
        "horovod/common/tensor_queue.cc",
        """  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);""",
        """  std::lock_guard<std::mutex> guard(mutex_);
  open_ = false;
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);""",
    ),
    HostChange(
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n",
        "    state.process_set_table.Get(0).tensor_queue.WaitForEntries(sleep_duration);\n",
    ),
    HostChange(
        "horovod/common/operations.cc",
        "    // Reset initialization flag\n",
        "    horovod_global.process_set_table.Get(0).tensor_queue.Open();\n    // Reset initialization flag\n",
    ),
    HostChange(
        "horovod/common/operations.cc",
        "    horovod_global.background_thread.join();\n",
        """    horovod_global.process_set_table.Get(0).tensor_queue.Wake();
    horovod_global.background_thread.join();
""",
    ),
    # Each connection waited for the loop's next round, 10 ms, before it was made.
    HostChange(
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        """    std::unique_lock<std::mutex> lock(m_);
    cv_.wait(lock);
""",
        """    std::unique_lock<std::mutex> lock(m_);
    // The round begins now, and ends when this thread waits for it.
    defer([this]() { std::lock_guard<std::mutex> guard(m_); });
    cv_.wait(lock);
""",
    ),
    # A value that the user has fixed stays so when Horovod is started again; it wrote behind the end of a vector.
    HostChange(
        "horovod/common/parameter_manager.cc",
        """    fixed_values_[variable] = value;
    ResetBayes();
  } else {
""",
        """    fixed_values_[variable] = value;
    ResetBayes();
  } else if (fixed_values_.find(variable) != fixed_values_.end()) {
    fixed_values_[variable] = value;
  } else {
""",
    ),
    # The view has been replaced: what has not been published will never be.
    HostChange(
        "horovod/common/gloo/http_store.cc",
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
        """      if (response.status == 410) {
        break;
      }
      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {
""",
    ),
    # When a connection ends, Gloo tells the operations that it has not begun. One that has begun waited for the
    # timeout: a message half sent or half received, or one that the peer's end has left unsent.
    HostChange(
        _PAIR,
        """      op.buf->signalException(ex);
    }
  }

  // Loop through pending send operations.
""",
        """      op.buf->signalException(ex);
    }
    NonOwningPtr<UnboundBuffer> sent(op.ubuf);
    if (sent) {
      sent->signalException(ex);
    }
  }

  {
    NonOwningPtr<UnboundBuffer> received(rx_.ubuf);
    if (received) {
      received->signalException(ex);
    }
  }

  // Loop through pending send operations.
""",
    ),
    # An operation that fails takes its memory with it. What is under way to that memory cannot be received any more,
    # nor anything behind it: the connection waited, and its end was never read.
    HostChange(
        _PAIR,
        """    if (nbytes < 0) {
      return false;
    }
""",
        """    if (nbytes < 0) {
      if (rx_.ubuf) {
        signalException(GLOO_ERROR_MSG("Nobody waits for a message any more ", peer_.str()));
      }
      return false;
    }
""",
    ),
    HostChange(
        _PAIR,
        """    buf = NonOwningPtr<UnboundBuffer>(op.ubuf);
    if (!buf) {
      return false;
    }
""",
        """    buf = NonOwningPtr<UnboundBuffer>(op.ubuf);
    if (!buf) {
      signalException(GLOO_ERROR_MSG("Nobody keeps a message any more ", peer_.str()));
      return false;
    }
""",
    ),
    # A thread that holds a connection's lock may have to wait for a core. Gloo's loop asked for the lock again and
    # again meanwhile, and took the core: with one more busy process on the machine, each message took 4 or 8 ms.
    HostChange(
        _PAIR,
        """  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return;
  }
""",
        """  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return;
  }
""",
    ),
    HostChange(_PAIR, "#include <array>\n", "#include <array>\n#include <chrono>\n#include <thread>\n"),
    # A connection that ends while it is accepted has no address any more, which ended the process.
    HostChange(
        _PAIR,
        """  if (state_ == CONNECTED) {
    handleReadWrite(events);
    return;
  }

  if (state_ == LISTENING) {
    handleListening();
    return;
  }

  if (state_ == CONNECTING) {
    handleConnecting();
    return;
  }

  GLOO_ENFORCE(false, "Unexpected state: ", state_);
""",
        """  try {
    if (state_ == CONNECTED) {
      handleReadWrite(events);
    } else if (state_ == LISTENING) {
      handleListening();
    } else if (state_ == CONNECTING) {
      handleConnecting();
    } else {
      GLOO_ENFORCE(false, "Unexpected state: ", state_);
    }
  } catch (const std::exception& error) {
    if (ex_ == nullptr) {
      signalException(error.what());
    }
  }
""",
    ),
    HostChange(
        _PAIR,
        """  int rv;

  // Reset addresses
""",
        """  int rv;

  // From here on, an error closes what the loop watches.
  device_->registerDescriptor(fd_, EPOLLIN, this);

  // Reset addresses
""",
    ),
    HostChange(
        _PAIR,
        """  GLOO_ENFORCE_NE(rv, -1);

  device_->registerDescriptor(fd_, EPOLLIN, this);
  changeState(CONNECTED);
""",
        """  GLOO_ENFORCE_NE(rv, -1);

  changeState(CONNECTED);
""",
    ),
)


def fingerprint() -> str:
    """A short hash of all changes."""
    added = [_beside(name).read_text() for name in ADDED.values()]
    return hashlib.sha256(repr((CHANGES, added)).encode()).hexdigest()[:12]


def _beside(name: str) -> Path:
    return Path(__file__).with_name(name)


def apply(root: Path) -> None:
    """Change the unpacked source under `root`, and add our files.

    Raises:
        UsageError: The source is not the one that the changes were made for.
    """
    for change in CHANGES:
        path = root / change.path
        text = path.read_text()
        if text.count(change.old) != 1:
            raise UsageError(
                f"{change.path} is not that of Horovod {VERSION}: expected once, and found "
                f"{text.count(change.old)} times: {change.old.strip()!r}"
            )
        path.write_text(text.replace(change.old, change.new))
    for target, name in ADDED.items():
        (root / target).write_text(_beside(name).read_text())
