"""A stand-in for Google Cloud Storage: its JSON API over HTTP, objects in memory, on a port of this machine.

gcsfs, google-cloud-storage and TensorStore speak to it as they speak to Google once `ENVIRONMENT` names it.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
COPY = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/(moveTo|rewriteTo|copyTo)(?:/b/([^/]+))?/o/([^/]+)")
LISTING = re.compile(r"/storage/v1/b/([^/]+)/o/?")
BUCKET = re.compile(r".*/storage/v1/b/([^/]+)/?")
UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o/?")


class Storage:
    """The buckets, and how to misbehave.

    objects: (bucket, name) -> (content, generation).   reads: names of the objects whose content was read, in order.
    refuse: (status, message) that answers every request, or None; or a function that gives it of (method, route).
    delay: seconds that a read of content takes.   served: bytes of the ranges that were read.
    """

    def __init__(self, *buckets: str):
        self.buckets, self.lock, self.generation = set(buckets), threading.RLock(), 1000
        self.reset()
        self.server = _Server(("127.0.0.1", 0), _Handler)
        self.server.storage = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self):
        """Empty the buckets, and behave."""
        self.objects, self.uploads, self.reads, self.served, self.refuse, self.delay = {}, {}, [], 0, None, 0.0

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send the clients of this process or of another one here."""
        return {
            "STORAGE_EMULATOR_HOST": self.url, "TENSORSTORE_GCS_HTTP_URL": self.url, "NO_GCE_CHECK": "true",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token", "GOOGLE_CLOUD_PROJECT": "project",
        }  # fmt: skip

    def put(self, bucket, name, content) -> dict:
        with self.lock:
            self.generation += 1
            self.objects[bucket, name] = bytes(content), self.generation
            return self.describe(bucket, name)

    def describe(self, bucket, name) -> dict:
        content, generation = self.objects[bucket, name]
        link = f"{self.url}/download/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"
        return {
            "kind": "storage#object", "bucket": bucket, "name": name, "id": f"{bucket}/{name}/{generation}",
            "size": str(len(content)), "generation": str(generation), "metageneration": "1", "etag": str(generation),
            "updated": "2026-01-01T00:00:00.000Z", "timeCreated": "2026-01-01T00:00:00.000Z",
            "mediaLink": link, "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        }  # fmt: skip

    def names(self, bucket) -> list[str]:
        return sorted(name for where, name in self.objects if where == bucket)

    def upload_folder(self, folder, bucket, prefix):
        """What `gcloud storage cp -r FOLDER/* gs://BUCKET/PREFIX/` does."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(bucket, f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 100

    def handle_error(self, *_):
        if not isinstance(sys.exception(), ConnectionError):  # clients that are killed or lose interest are no news
            super().handle_error(*_)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    log_message = lambda *_: None

    def _handle(self):
        self.storage = self.server.storage
        parts = urlsplit(self.path)
        self.route = re.sub("//+", "/", parts.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self._chunk, b""))
        refuse = self.storage.refuse
        if refused := refuse(self.command, self.route) if callable(refuse) else refuse:
            self._error(*refused)
            return
        where = BUCKET.match(self.route)
        with self.storage.lock:
            if where and where[1] in self.storage.buckets:
                answers = {"DELETE": self._delete, "POST": self._post, "PUT": self._post}
                answers.get(self.command, self._get)()
            else:
                self._error(404, "The specified bucket does not exist.")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _chunk(self):
        content = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return content

    def _get(self):
        if found := OBJECT.fullmatch(self.route):
            key = found[1], unquote(found[2])
            if key not in self.storage.objects:
                self._error(404, f"No such object: {'/'.join(key)}")
            elif not self._blocked(key):
                if self.query.get("alt") == "media":
                    self._content(key)
                else:
                    self._send(200, self.storage.describe(*key))
        elif found := LISTING.fullmatch(self.route):
            self._list(found[1])
        elif found := BUCKET.fullmatch(self.route):
            self._send(200, {"kind": "storage#bucket", "name": found[1], "id": found[1], "location": "US"})
        else:
            self._error(404, f"unknown: {self.route}")

    def _content(self, key):
        content, generation = self.storage.objects[key]
        self.storage.reads.append(key[1])
        if self.storage.delay:
            self.storage.lock.release()
            time.sleep(self.storage.delay)
            self.storage.lock.acquire()
        headers, status = {"x-goog-generation": str(generation), "Accept-Ranges": "bytes"}, 200
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            start = int(asked[1]) if asked[1] else max(len(content) - int(asked[2]), 0)
            end = min(int(asked[2]) + 1 if asked[1] and asked[2] else len(content), len(content))
            if start >= len(content):
                self._error(416, "Requested range not satisfiable")
                return
            headers["Content-Range"], status = f"bytes {start}-{end - 1}/{len(content)}", 206
            content = content[start:end]
            self.storage.served += len(content)
        self._send(status, content, headers)

    def _list(self, bucket):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        first, end = self.query.get("startOffset", ""), self.query.get("endOffset", chr(sys.maxunicode))
        entries = {}  # name or common prefix -> object, None for a prefix
        for name in self.storage.names(bucket):
            if name.startswith(prefix) and first <= name < end:
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                entries[name[: cut + 1] or name] = None if cut >= 0 else self.storage.describe(bucket, name)
        wanted = [name for name in entries if name > self.query.get("pageToken", "")]
        page = wanted[: int(self.query.get("maxResults", 1000))]
        items, prefixes = filter(None, map(entries.get, page)), [name for name in page if entries[name] is None]
        answer = {"kind": "storage#objects", "items": [*items], "prefixes": prefixes}
        if len(page) < len(wanted):
            answer["nextPageToken"] = page[-1]
        self._send(200, answer)

    def _post(self):
        if found := COPY.fullmatch(self.route):
            source, target = (found[1], unquote(found[2])), (found[4] or found[1], unquote(found[5]))
            if source not in self.storage.objects:  # as a folder is not: the client then copies what is in it
                self._error(404, "No such object")
                return
            answer = self.storage.put(*target, self.storage.objects[source][0])
            if found[3] == "moveTo":
                del self.storage.objects[source]
            else:
                answer = {"kind": "storage#rewriteResponse", "done": True, "resource": answer}
            self._send(200, answer)
        elif found := UPLOAD.fullmatch(self.route):
            self._upload(found[1])
        else:
            self._error(404, f"unknown: {self.route}")

    def _upload(self, bucket):
        if "upload_id" in self.query:
            self._resume(bucket, *self.storage.uploads[self.query["upload_id"]])
        elif self.query.get("uploadType") == "resumable":
            name = self.query.get("name") or json.loads(self.body)["name"]
            session = str(len(self.storage.uploads))
            self.storage.uploads[session] = name, bytearray()
            self._send(200, b"", {"Location": f"{self.storage.url}/upload/storage/v1/b/{bucket}/o?upload_id={session}"})
        elif self.query.get("uploadType") == "multipart":
            boundary = re.search(r"boundary=\"?'?([^\"';]+)", self.headers["Content-Type"])[1].encode()
            parts = re.split(rb"(?:\r?\n)?--" + re.escape(boundary), self.body)
            description, content = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts[1:3])
            self._store(bucket, json.loads(description)["name"], content)
        else:
            self._store(bucket, self.query["name"], self.body)

    def _resume(self, bucket, name, content):
        content += self.body
        total = self.headers["Content-Range"].rpartition("/")[2]
        if total != "*" and len(content) == int(total):
            self._store(bucket, name, content)
        else:
            self._send(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})

    def _store(self, bucket, name, content):
        if not self._blocked((bucket, name)):
            self._send(200, self.storage.put(bucket, name, content))

    def _delete(self):
        found = OBJECT.fullmatch(self.route)
        key = found and (found[1], unquote(found[2]))
        if key not in self.storage.objects:
            self._error(404, "No such object")
        elif not self._blocked(key):
            del self.storage.objects[key]
            self._send(204, b"")

    def _blocked(self, key) -> bool:
        """Whether a precondition on the generation fails, which is then answered."""
        generation = str(self.storage.objects.get(key, (b"", 0))[1])
        if self.query.get("ifGenerationMatch", generation) != generation:
            self._error(412, "conditionNotMet")
        elif self.query.get("ifGenerationNotMatch") == generation:
            self._send(304, b"")
        else:
            return False
        return True

    def _error(self, status, message):
        self._send(status, {"error": {"code": status, "message": message, "errors": [{"message": message}]}})

    def _send(self, status, content, headers=None):
        if isinstance(content, dict):
            content, headers = json.dumps(content).encode(), {"Content-Type": "application/json"}
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if self.command != "HEAD" else b"")
