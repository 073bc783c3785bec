"""What has to change in Horovod's source: so that it builds, and so that no lost peer takes a process with it.

A change is a piece of text that occurs once in a file, and what stands there afterwards. Anything else is an error:
the source is not the one that the changes were made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ef_common.errors import UsageError

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
REVISION = 1
"""Counts the changes. It is the wheel's local version: `0.28.1+elasticflow.1`."""


@dataclass(frozen=True)
class Change:
    """One change of one file.

    Attributes:
        path: File, from the root of the source.
        old: What occurs there exactly once.
        new: What stands there instead.
    """

    path: str
    old: str
    new: str


_STANDARD = "torch and TensorFlow have headers in C++20"
CHANGES = (
    Change("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    Change("CMakeLists.txt", '"-std=c++11" "-std=c++17" GLOO_CMAKE', '"-std=c++11" "-std=c++20" GLOO_CMAKE'),
    Change("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)\\n", "set(CMAKE_CXX_STANDARD 20)\\n"),
    Change("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    Change("horovod/tensorflow/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 17)", "set(CMAKE_CXX_STANDARD 20)"),
    # Off by default, and TensorFlow has moved the headers that it needs.
    Change(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # A peer that dies while the group is built throws in the background thread, which would end the process.
    Change(
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
    Change(
        "horovod/common/operations.cc",
        """    horovod_global.initialize_flag.clear();
    horovod_global.shut_down = false;
""",
        """    horovod_global.initialize_flag.clear();
    horovod_global.initialization_failed = false;
    horovod_global.shut_down = false;
""",
    ),
)


def apply(root: Path) -> None:
    """Change the unpacked source under `root`.

    Raises:
        UsageError: It is not the source that the changes were made for.
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
