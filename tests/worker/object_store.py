"""The parts of Google Cloud Storage's JSON API and of S3's REST API that tensorstore uses, in this process, for tests
without a network.

The real services cannot run here; what is tested against this is the order in which an array comes to be in a store
that cannot rename.
"""

import hashlib
import http.server
import json
import threading
import urllib.parse
from xml.sax.saxutils import escape


class ObjectStore:
    """Objects by name, of one bucket whatever it is called."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        """method and object (or prefix), in order"""
        self.generation = 0
        self.refuse_writes_after: int | None = None
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _handler(store: ObjectStore) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _asked(self) -> tuple[str, dict[str, str]]:
            url = urllib.parse.urlsplit(self.path)
            parameters = dict(urllib.parse.parse_qsl(url.query))
            if "/storage/v1/b/" in url.path:
                _, _, name = url.path.partition("/o/")
                name = urllib.parse.unquote(name) or parameters.get("name", "")
            else:  # S3: /bucket/name
                name = urllib.parse.unquote(url.path.removeprefix("/").partition("/")[2])
            store.requests.append((self.command, name))
            return name, parameters

        def _reply(self, code: int, body: bytes = b"", generation: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            if generation is not None:
                self.send_header("x-goog-generation", str(generation))
                self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            name, parameters = self._asked()
            if name:
                data = store.objects.get(name)
                self._reply(404 if data is None else 200, data or b"", None if data is None else 1)
                return
            if "list-type" in parameters:
                names = [name for name in sorted(store.objects) if name.startswith(parameters.get("prefix", ""))]
                self._reply(200, _list_of(names, store.objects))
                return
            low, high = parameters.get("startOffset", ""), parameters.get("endOffset", "\U0010ffff")
            names = [name for name in sorted(store.objects) if low <= name < high]
            items = [{"name": name, "generation": "1", "size": str(len(store.objects[name]))} for name in names]
            self._reply(200, json.dumps({"items": items}).encode())

        def _write(self) -> str | None:
            """The object that was written; None if it was refused."""
            name, _ = self._asked()
            data = self.rfile.read(int(self.headers["Content-Length"]))
            writes = sum(method in ("POST", "PUT") for method, _ in store.requests)
            if store.refuse_writes_after is not None and writes > store.refuse_writes_after:
                self._reply(403, b"over quota")
                return None
            store.generation += 1
            store.objects[name] = data
            return name

        def do_POST(self) -> None:
            name = self._write()
            if name is not None:
                self._reply(200, json.dumps({"name": name, "generation": str(store.generation)}).encode())

        def do_PUT(self) -> None:
            if self._write() is not None:
                self._reply(200, generation=store.generation)

        def do_DELETE(self) -> None:
            name, _ = self._asked()
            self._reply(404 if store.objects.pop(name, None) is None else 204)

    return Handler


def _list_of(names: list[str], objects: dict[str, bytes]) -> bytes:
    content = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name])}</Size></Contents>" for name in names
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<KeyCount>{len(names)}</KeyCount><IsTruncated>false</IsTruncated>{content}</ListBucketResult>"
    ).encode()
