"""A store: the few operations that checkpoints need, on anything that fsspec can reach.

There is no code for a particular kind of store here, except that one is known by its name (`Store.shares`). These
places bridge the differences:

* directories: object stores have none, others need them to be made first (`_make_parents`);
* listings: stores cache the ones that they have seen, so each listing is requested again;
* giving up on a write: an incomplete object never existed, but a file is there as soon as it is opened;
* joining: S3 limits the size of a part, and Google Cloud Storage the number of parts;
* errors: each store has its own, and all become ours.

Every error of a store is a `StorageFailed` with a reason (`NotFound` is one of them) or `AlreadyExists`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar, cast

import xxhash

from ef_common.errors import AlreadyExists, NotFound, StorageError, StorageFailed, UsageError
from ef_common.storage.failures import failure, redact, secrets_of
from ef_common.storage.write_back import WriteBack, sync

CHECKSUM = "xxh3_128"
CHUNK_BYTES = 8 << 20
"""How much is read or written at once."""

PART_BYTES = 16 << 20
"""Object stores get files in parts of this size. They allow 10,000 of them, and keep a few copies of one in memory."""

NUM_READERS = 8
"""How many parts of an object are read at once: one connection to an object store is slow."""

_PATTERN = frozenset("*?[")
"""With one of these, `rm` takes a path for the pattern of others, except in the local file system."""
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)

Way = Literal["ranges", "parts", "few parts"]
"""How several writers write one file: in ranges of it, in parts of limited size, or in at most 32 parts of any size."""

_T = TypeVar("_T")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


_URL = re.compile(r"[A-Za-z0-9+.-]+(?:://|::)|(?:file|local):")
"""How what fsspec takes for a URL begins; the name of a folder may have a colon, too, as a time has."""


def absolute(url: str) -> str:
    """A URL as it is; a path from the root. A shell leaves the ``~`` of ``--checkpoint=~/run`` alone."""
    return url if _URL.match(url) else os.path.abspath(os.path.expanduser(url))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a folder.

    Args:
        name: Within the folder.
        size: In bytes; None for a folder.
    """

    name: str
    size: int | None


class Store:
    """A folder that fsspec can reach. Nothing is contacted before the first operation.

    Names are relative, with slashes. All operations block, for as long as the store lets them; only a thread that may
    wait should call them. They can be called from any thread.

    Args:
        url: ``s3://bucket/run``, ``gs://bucket/run``, ``file:///mnt/shared/run``, a path (``~`` is the home
            directory), or any URL of fsspec.
        storage_options: For fsspec's filesystem of that kind: keys, endpoint, timeouts.

    Raises:
        UsageError: By the first operation, if the kind of store is unknown or its package is missing.

    Example:
        >>> store = Store("memory://example")
        >>> store.create("greeting", b"hello")
        >>> store.read("greeting"), [entry.name for entry in store.entries("")]
        (b'hello', ['greeting'])
    """

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        self._url = absolute(os.fspath(url))  # the working directory may be another one later
        self._options = dict(storage_options or {})
        self._secrets = secrets_of(self._options)
        self._filesystem: Any = None
        self._root = ""

    def __str__(self) -> str:
        """The URL, without secrets."""
        return redact(self._url)

    # ------------------------------------------------------------ operations

    def create(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Write a small file, unless one of this name exists. After a failure its content is removed or kept.

        In a file system nobody ever finds a part of it, also if this process is killed, where there are hard links.

        A store may have done what it then reports as failed, and be asked again. So one that exists counts as ours if
        it holds the same bytes: they should contain something that nobody else writes.

        Raises:
            AlreadyExists: With other contents.
            StorageFailed: It may exist now, or not.
        """
        try:
            if not (self._is_local and self._create_by_link(name, data)):
                with self._opened(name, "xb", f"create {name}", keep=keep) as file:
                    file.write(data)
            if self._is_local:
                self._run(f"create {name}", lambda _: _sync_folders(self._path(name), upto=self._root))
        except AlreadyExists:
            if self.read(name) != data:
                raise

    def _create_by_link(self, name: str, data: bytes) -> bool:
        """Write the file under another name first; False if the file system has no hard links."""
        folder, _, last = name.rpartition("/")
        draft = f"{folder}/.{last}.{secrets.token_hex(8)}".lstrip("/")
        what = f"create {name}"

        def link(_: Any) -> bool:
            try:
                os.link(self._path(draft), self._path(name))
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return False
                raise
            return True

        with self._opened(draft, "wb", what) as file:
            file.write(data)
        try:
            return self._run(what, link, exclusive=True)
        finally:
            with contextlib.suppress(StorageFailed):
                self.delete(draft)

    def read(self, name: str) -> bytes:
        """All bytes of a small file."""
        return cast(bytes, self._run(f"read {name}", lambda fs: fs.cat_file(self._path(name))))

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[Writer]:
        """Write a file as a stream. If the block raises, nothing is left under this name, as far as possible."""
        what = f"write {name}"
        with self._opened(name, "wb", what) as file, self._translated(file, what) as writer:
            yield writer

    @property
    def shares(self) -> Way | None:
        """How several writers can write one file: into ranges of it, in parts that the store joins, or not at all."""
        if self._is_local:
            return "ranges"
        if not callable(getattr(self._connected(), "merge", None)):
            return None
        return "few parts" if "gs" in self._connected().protocol else "parts"

    @contextlib.contextmanager
    def range_writer(self, name: str, start: int) -> Iterator[Writer]:
        """Write a part of a file as a stream from an offset; other content stays. The file is created if needed."""
        what = f"write {name}"
        file = self._run(what, lambda fs: _open_at(fs, self._path(name), start))
        try:
            with self._translated(file, what) as writer:
                yield writer
            self._run(what, lambda _: _complete(file))
        except BaseException:
            with contextlib.suppress(Exception):
                file.close()
            raise

    def join(self, parts: Sequence[str], name: str) -> None:
        """Make one file of several, within the store; the parts stay."""
        path, sources = self._path(name), [self._path(part) for part in parts]
        try:
            self._run(f"join parts to {name}", lambda fs: fs.merge(path, sources))
        except StorageError:
            with contextlib.suppress(StorageError):
                self._run(f"abort uploads of {name}", lambda fs: _abort_uploads(fs, path))
            raise

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file; an existing file with the new name is replaced."""
        self._run(f"rename {name}", lambda fs: fs.mv(self._path(name), self._path(new_name)))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Close it. Reading raises the store's own errors: `copy` translates them."""
        return cast(BinaryIO, self._run(f"read {name}", lambda fs: fs.open(self._path(name), "rb")))

    def copy(self, name: str, target: Callable[[bytes], object]) -> tuple[int, str]:
        """Read a file once, in pieces.

        Returns:
            How many bytes there were, and their checksum.
        """
        size, digest = 0, xxhash.xxh3_128()
        with self.open(name) as file:
            while piece := self._run(f"read {name}", lambda _: file.read(CHUNK_BYTES)):
                size += len(piece)
                digest.update(piece)
                target(piece)
        return size, digest.hexdigest()

    def read_into(self, name: str, target: memoryview) -> tuple[int, str]:
        """Read a file once, into memory; content beyond that memory is not read.

        Returns:
            How many bytes there are (at least: one more, if there are more), and the checksum of those that were read.
        """
        digest = xxhash.xxh3_128()
        read = self._read_ranges if self._run(f"read {name}", lambda fs: fs.async_impl) else self._read_stream
        hashed: list[Future[None]] = []
        with ThreadPoolExecutor(
            1, thread_name_prefix="ef-hash"
        ) as hashing:  # a piece is hashed while the next ones are read
            size = read(name, target, lambda piece: hashed.append(hashing.submit(digest.update, piece)))
        for one in hashed:
            one.result()
        return size, digest.hexdigest()

    def _read_stream(self, name: str, target: memoryview, took: Callable[[memoryview], object]) -> int:
        size = 0
        with self.open(name) as file:
            while size < len(target):
                room = target[size : size + CHUNK_BYTES]
                num = self._run(f"read {name}", lambda _, room=room: file.readinto(room))  # type: ignore[misc, attr-defined]
                if not num:
                    return size
                took(room[:num])
                size += num
            return size + len(self._run(f"read {name}", lambda _: file.read(1)))

    def _read_ranges(self, name: str, target: memoryview, took: Callable[[memoryview], object]) -> int:
        """Read several ranges at once, on filesystems that allow it: those of object stores."""
        path = self._path(name)
        size = int(self._run(f"read {name}", lambda fs: fs.size(path)))
        wanted = target[:size]

        def read(start: int) -> memoryview:
            room = wanted[start : start + PART_BYTES]

            def fetch(fs: Any) -> None:
                data = fs.cat_file(path, start=start, end=start + len(room))
                if len(data) != len(room):
                    raise OSError(f"expected {len(room)} bytes from {start} on. Received: {len(data)}")
                room[:] = data

            self._run(f"read {name}", fetch)
            return room

        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="ef-read") as readers:
            for piece in readers.map(read, range(0, len(wanted), PART_BYTES)):
                took(piece)
        return size

    def entries(self, folder: str) -> list[Entry]:
        """The entries of a folder by name; empty if there is no such folder. A link is what it points to."""

        def is_folder(info: Any) -> bool:
            if info["type"] in ("directory", "file"):
                return bool(info["type"] == "directory")
            return self._run(f"list {info['name']}", lambda fs: bool(fs.isdir(info["name"])))

        def listing(fs: Any) -> Any:
            fs.invalidate_cache()
            try:
                return fs.ls(self._path(folder), detail=True)
            finally:
                fs.invalidate_cache()  # or what others create from now on could not be read

        try:
            found = self._run(f"list {folder or 'the store'}", listing)
        except NotFound:
            return []
        path = self._path(folder).rstrip("/")
        entries = [
            Entry(info["name"].rstrip("/").rsplit("/", 1)[-1], None if is_folder(info) else info["size"])
            for info in found
            if info["name"].rstrip("/") != path  # object stores may list the folder itself
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        """Remove a file; it is no error if it is gone already."""
        with contextlib.suppress(NotFound):
            self._run(f"delete {name}", lambda fs: fs.rm_file(self._path(name)))

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        """Remove a folder and its contents; it is no error if it is gone already.

        Args:
            name: Of the folder. If this is a link, what it points to stays as it is.
            first: A file in it that is removed before the others.
        """
        if self._is_local and os.path.islink(self._path(name)):
            self.delete(name)
            return
        if first is not None:
            self.delete(f"{name}/{first}")
        if self._is_local or _PATTERN.isdisjoint(self._path(name)):
            self._remove(name, lambda fs: fs.rm(self._path(name), recursive=True))
            return
        for entry in self.entries(name):
            (self.delete_folder if entry.size is None else self.delete)(f"{name}/{entry.name}")

        def remove_empty(fs: Any) -> None:
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # a folder of an object store is its contents
                fs.rmdir(self._path(name))

        self._remove(name, remove_empty)

    def _remove(self, name: str, act: Callable[[Any], object]) -> None:
        """Remove it so, unless it is gone already."""

        def remove(fs: Any) -> None:
            fs.invalidate_cache()
            act(fs)

        with contextlib.suppress(NotFound):
            self._run(f"delete {name}", remove)

    # ------------------------------------------------------------ fsspec

    @property
    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._connected(), LocalFileSystem)

    @contextlib.contextmanager
    def _translated(self, file: Any, what: str) -> Iterator[Writer]:
        write_back = WriteBack(_descriptor(file))
        writer = Writer(file, lambda error: self._failure(error, what), write_back.wrote)
        try:
            yield writer
        except Exception:
            if writer.failure is not None:  # whoever wrote may have made another error of it
                raise writer.failure from None
            raise
        finally:
            write_back.wait()
        self._run(what, lambda _: write_back.check())

    @contextlib.contextmanager
    def _opened(self, name: str, mode: str, what: str, *, keep: bool = False) -> Iterator[Any]:
        """A file to write, which is completed at the end of the block or given up."""
        exclusive = "x" in mode
        file = self._run(what, lambda fs: self._open(fs, name, mode), exclusive=exclusive)
        try:
            yield file
            self._run(what, lambda _: _complete(file), exclusive=exclusive)
        except BaseException as error:
            # Another one's file, or what a store has received in full, must not be removed.
            if not isinstance(error, AlreadyExists):
                _give_up(file)
                if not keep and not hasattr(file, "_upload_chunk"):
                    with contextlib.suppress(StorageFailed):
                        self.delete(name)
            raise

    def _open(self, fs: Any, name: str, mode: str) -> Any:
        path = self._path(name)
        try:
            return fs.open(path, mode, block_size=PART_BYTES)
        except FileNotFoundError:
            _make_parents(fs, fs._parent(path))
            return fs.open(path, mode, block_size=PART_BYTES)

    def _run(self, what: str, operation: Callable[[Any], _T], *, exclusive: bool = False) -> _T:
        try:
            return operation(self._connected())
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                self._filesystem = None  # only a new one reads credentials that have been renewed
            raise self._failure(error, what, exclusive=exclusive) from None

    def _failure(self, error: BaseException, what: str, *, exclusive: bool = False) -> StorageError:
        return failure(error, f"{what} in {self}", secrets=self._secrets, exclusive=exclusive)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _connected(self) -> Any:
        if self._filesystem is None:
            self._filesystem, self._root = _connect(self._url, self._options, shown=str(self))
        return self._filesystem


class Writer(io.RawIOBase):
    """A stream to write to, which counts and computes the checksum. It cannot seek.

    Attributes:
        size: Bytes so far.
        failure: The store's error while writing.
    """

    def __init__(
        self, file: Any, translate: Callable[[BaseException], Exception], wrote: Callable[[int], object]
    ) -> None:
        self.size = 0
        self.failure: Exception | None = None
        self._file = file
        self._translate = translate
        self._wrote = wrote
        self._digest = xxhash.xxh3_128()

    @property
    def checksum(self) -> str:
        """Checksum of the bytes so far."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        """Write all of it, in pieces, because stores keep a copy of what they get."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            try:
                self._file.write(piece)
            except Exception as error:
                self.failure = self._translate(error)
                raise self.failure from None
            self._digest.update(piece)
            self.size += len(piece)
            self._wrote(self.size)
        return len(view)


def _connect(url: str, options: Mapping[str, Any], *, shown: str) -> tuple[Any, str]:
    """The filesystem of a URL, and the path of the URL in it."""
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    try:
        # Not one that others use too: its listings and its credentials are ours to forget.
        fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f"pip install 'elasticflow-training[{extra}]'" if extra else str(error)
        raise UsageError(f"The package for {protocol}:// is missing. Received: {shown}. Install it: {hint}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"fsspec does not take this store. Received: {shown}: {redact(str(error))}") from None
    return fs, str(root).rstrip("/")


def _make_parents(fs: Any, folder: str) -> None:
    """Make a directory and its parents. In object stores the first part is a bucket, which is not ours to make."""
    if not fs.root_marker and "/" not in folder.strip("/"):
        raise FileNotFoundError(f"There is no bucket {folder}")
    try:
        fs.mkdir(folder, create_parents=False)
    except FileExistsError:
        return
    except FileNotFoundError:
        if fs._parent(folder) == folder:
            raise
        _make_parents(fs, fs._parent(folder))
        with contextlib.suppress(FileExistsError):
            fs.mkdir(folder, create_parents=False)


def _abort_uploads(fs: Any, path: str) -> None:
    """Abort the incomplete uploads of an object: s3fs leaves that of a join that fails, with copies of the parts."""
    if hasattr(fs, "abort_mpu"):
        bucket, key, _ = fs.split_path(path)
        for upload in fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", []):
            if upload["Key"] == key:
                fs.abort_mpu(bucket, key, upload["UploadId"])


def _descriptor(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except (AttributeError, OSError):
        return None


def _open_at(fs: Any, path: str, start: int) -> Any:
    """Open a file of a local file system that others may write to at the same time, at an offset.

    It is open for writing only: of a page of a file that can be read, too, a client of NFS fetches what is not written,
    and later sends all of the page, with old bytes in place of what others have written meanwhile.
    """
    try:
        fs.touch(path, truncate=False)
    except FileNotFoundError:
        _make_parents(fs, fs._parent(path))
        fs.touch(path, truncate=False)
    file = os.fdopen(os.open(fs._strip_protocol(path), os.O_WRONLY), "wb")
    file.seek(start)
    return file


def _complete(file: Any) -> None:
    """Close a file; with a descriptor, after its bytes are on the disk, since a manifest vouches for them."""
    number = _descriptor(file)
    if number is not None:
        file.flush()
        sync(number)
    file.close()


def _sync_folders(path: str, *, upto: str) -> None:
    """Sync the names of a file and its folders to the disk; a power cut may otherwise lose the file."""
    last = os.path.dirname(upto or "/")  # the root of a file system is "" here
    while path != last:
        path = os.path.dirname(path)
        try:
            number = os.open(path, os.O_RDONLY)
        except PermissionError:  # a folder that may be passed through, but not read
            continue
        try:
            sync(number)
        finally:
            os.close(number)


def _give_up(file: Any) -> None:
    """Close a file so that incomplete content does not become a file."""
    with contextlib.suppress(Exception):
        if hasattr(file, "_upload_chunk"):  # fsspec's base class of uploads: closing, even by the collector, completes
            try:
                file.discard()
            finally:
                file.closed = True
        else:
            file.close()
