"""Fetching images: from public addresses over https only, within limits; a server of our own."""

from __future__ import annotations

import http.server
import ipaddress
import socket
import ssl
import threading
import time

import pytest

from civetta.chat.image_rules import BadImage
from civetta.chat.image_url import ImageFetcher, RequestFetcher, is_public

# Made for images.test and other.test, valid to 2126; it protects nothing.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg7tBtDW4C4+nUfDYu
z1SPbPbEXN8mFkD5tyDUd+VUaoKhRANCAATc91uwRAI/WdDrh54SVOu7GCdgc2bv
qQEsONAnRfV6hlNJX+MscwSI6OraHBCLKTsUGs+ByHpe65FTYgafRpo7
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBpjCCAU2gAwIBAgIUCDBs/rQnEH/JMf6vj7sOCV8OrZkwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLaW1hZ2VzLnRlc3QwIBcNMjYxMjAyMDcxNDMwWhgPMjEyNjEx
MDgwNzE0MzBaMBYxFDASBgNVBAMMC2ltYWdlcy50ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAE3PdbsEQCP1nQ64eeElTruxgnYHNm76kBLDjQJ0X1eoZTSV/j
LHMEiOjq2hwQiyk7FBrPgch6XuuRU2IGn0aaO6N3MHUwHQYDVR0OBBYEFF92Zk+M
+gTjRm5G0f0uBrWNuYIGMB8GA1UdIwQYMBaAFF92Zk+M+gTjRm5G0f0uBrWNuYIG
MA8GA1UdEwEB/wQFMAMBAf8wIgYDVR0RBBswGYILaW1hZ2VzLnRlc3SCCm90aGVy
LnRlc3QwCgYIKoZIzj0EAwIDRwAwRAIgaUhQgG9L5RGKEda6znarzgnnt1LJhP2M
HVKDbHJus2UCIHpGBHhw40S0RZhKkRORR1CTg+9ag1MhbM9fwrRIx89O
-----END CERTIFICATE-----
"""


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))
        action = getattr(self, "on_" + self.path.strip("/").partition("?")[0], None)
        if action is None:
            self.send_error(404)
        else:
            action()

    def reply(self, status: int, headers=(), body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def on_picture(self) -> None:
        self.reply(200, [("Content-Length", "5")], b"bytes")

    def on_typed(self) -> None:
        kind = self.path.partition("?")[2]
        self.reply(200, [("Content-Length", "5"), ("Content-Type", kind)], b"bytes")

    def on_large(self) -> None:
        self.reply(200, [("Content-Length", "1000001")])

    def on_endless(self) -> None:
        self.reply(200)
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def on_cut(self) -> None:
        self.reply(200, [("Content-Length", "500")], b"bytes")

    def on_drip(self) -> None:
        self.reply(200)
        try:
            while True:
                self.wfile.write(b"x")
                time.sleep(0.05)
        except OSError:
            pass

    def on_silent(self) -> None:
        time.sleep(3)

    def on_loop(self) -> None:
        self.reply(302, [("Location", "/loop")])

    def on_next(self) -> None:
        self.reply(307, [("Location", "picture")])

    def on_inside(self) -> None:
        self.reply(302, [("Location", "https://inside.test/picture")])

    def on_plain(self) -> None:
        self.reply(302, [("Location", "http://images.test/picture")])

    def on_nowhere(self) -> None:
        self.reply(302)

    def on_elsewhere(self) -> None:
        self.reply(301, [("Location", f"https://other.test:{self.server.server_port}/picture")])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pem = tmp_path_factory.mktemp("tls") / "cert.pem"
    pem.write_text(CERTIFICATE)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pem)
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.handle_error = lambda *args: None  # clients that go away are part of the test
    made.asked = []
    made.socket = serving.wrap_socket(made.socket, server_side=True)
    made.trust = ssl.create_default_context(cafile=str(pem))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def fetcher(server, **more) -> ImageFetcher:
    """Names lead to this machine, which counts as public; inside.test does not."""
    inside = {"inside.test": "10.0.0.1"}
    values = {
        "resolve": lambda host, port: [inside.get(host, "127.0.0.1")],
        "allowed": lambda address: address.is_loopback,
        "context": server.trust,
        **more,
    }
    return ImageFetcher(**values)


def url(server, path: str, host: str = "images.test") -> str:
    return f"https://{host}:{server.server_port}/{path}"


@pytest.mark.parametrize(
    "path",
    ["picture", "picture?x=1", "next", "elsewhere", "typed?image/png", "typed?IMAGE/webp;q=1",
     "typed?application/octet-stream"],
)  # fmt: skip
def test_a_picture_is_fetched(server, path) -> None:
    assert fetcher(server).fetch(url(server, path)) == b"bytes"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing", "status 404"),
        ("cut", "cannot be fetched|broke off"),
        ("loop", "redirects more than 3 times"),
        ("inside", "inside.test is not on the public network"),
        ("plain", "leads to http, not to https"),
        ("endless", "more than 1000000 bytes"),
        ("large", "1000001 bytes, and 1000000 are the limit"),
        ("typed?text/html;charset=utf-8", "sent 'text/html', which is no image"),
        ("typed?video/mp4", "sent 'video/mp4', which is no image"),
    ],
)
def test_other_replies_are_refused(server, path, words) -> None:
    with pytest.raises(BadImage, match=words):
        fetcher(server, max_bytes=1_000_000).fetch(url(server, path))


def test_a_redirect_to_nowhere_ends(server) -> None:
    with pytest.raises(BadImage):
        fetcher(server).fetch(url(server, "nowhere"))


@pytest.mark.parametrize("path", ["drip", "silent"])
def test_a_slow_sender_is_cut_off(server, path) -> None:
    with pytest.raises(BadImage, match=r"within 0\.3 s"):
        fetcher(server, timeout_s=0.3).fetch(url(server, path))


def test_a_slow_name_server_is_not_waited_for(server) -> None:
    answered = threading.Event()

    def slow(host, port):
        answered.wait(20)
        return ["127.0.0.1"]

    began_s = time.monotonic()
    with pytest.raises(BadImage, match=r"images\.test did not send it within 0\.3 s"):
        fetcher(server, resolve=slow, timeout_s=0.3).fetch(url(server, "picture"))
    assert time.monotonic() - began_s < 10
    answered.set()


@pytest.mark.parametrize(
    "host", ["localhost", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "[::1]", "[::ffff:7f00:1]",
             "169.254.169.254", "[fe80::1]", "0.0.0.0", "[64:ff9b::7f00:1]", "224.0.0.1"],
)  # fmt: skip
def test_spellings_of_inner_addresses_are_refused_by_the_systems_resolver(server, host) -> None:
    with pytest.raises(BadImage, match="not on the public network"):
        ImageFetcher(context=server.trust).fetch(url(server, "picture", host))


def test_a_redirect_is_looked_up_anew_and_refused_when_its_name_leads_inside(server) -> None:
    """The second name server's answer counts for the second address, not the first one's."""
    asked = []

    def resolve(host, port):
        asked.append(host)
        return ["127.0.0.1"] if host == "images.test" else ["127.0.0.1", "192.168.0.9"]

    with pytest.raises(BadImage, match=r"other\.test is not on the public network"):
        fetcher(server, resolve=resolve).fetch(url(server, "elsewhere"))
    assert asked == ["images.test", "other.test"]


def test_a_false_certificate_is_refused(server) -> None:
    with pytest.raises(BadImage, match="its certificate is not trusted"):
        fetcher(server).fetch(url(server, "picture", "third.test"))


def test_private_addresses_are_never_asked(server) -> None:
    before = len(server.asked)
    for resolve in (
        lambda host, port: ["127.0.0.1"],
        lambda host, port: ["93.184.215.14", "127.0.0.1"],  # one private answer is enough
        lambda host, port: ["::1"],
        lambda host, port: ["fe80::1%eth0"],
    ):
        refusing = ImageFetcher(resolve=resolve, context=server.trust)
        with pytest.raises(BadImage, match="not on the public network"):
            refusing.fetch(url(server, "picture"))
    with pytest.raises(BadImage, match="no address"):
        ImageFetcher(resolve=lambda host, port: []).fetch("https://images.test/")
    assert len(server.asked) == before


def test_the_checked_address_is_the_one_asked(server) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    found = fetcher(server, resolve=lambda host, port: next(answers))
    assert found.fetch(url(server, "picture")) == b"bytes"  # the name is looked up once


def test_a_name_that_is_not_known(server) -> None:
    def unknown(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(BadImage, match=r"cannot be fetched from images\.test \(the name has"):
        fetcher(server, resolve=unknown).fetch("https://images.test/")


@pytest.mark.parametrize(
    "address",
    ["http://images.test/", "https:///x", "https://user:pw@images.test/", "https://images.test:x/",
     "https://images.test:0/", "https://images.test/a b", "https://images.test/\u00e4", "https://[/"],
)  # fmt: skip
def test_malformed_addresses_are_refused(server, address) -> None:
    with pytest.raises(BadImage):
        fetcher(server).fetch(address)


PUBLIC = ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07::1", "2001:470::5efe:8.8.8.8"]
PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "2002:7f00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "2001:db8::1", "2001:0:4136:e378::",
    "192.0.0.8", "192.0.0.170", "192.88.99.1", "168.63.129.16", "3fff::1", "5f00::1", "2002:c058:6301::",
    "2001:470::5efe:127.0.0.1", "2001:470::200:5efe:10.0.0.1", "64:ff9b::a83f:8110",
]  # fmt: skip


def test_which_addresses_are_public() -> None:
    assert all(is_public(ipaddress.ip_address(text)) for text in PUBLIC)
    wrong = [text for text in PRIVATE if is_public(ipaddress.ip_address(text))]
    assert wrong == []


class Slow(ImageFetcher):
    """Takes all the time it is given, or three seconds, of a clock that is told."""

    def fetch(self, url):
        NOW_S[0] += min(3.0, self.timeout_s)
        ASKED.append(self.timeout_s)
        return b"bytes"


NOW_S, ASKED = [0.0], []


def test_the_images_of_one_request_have_a_time_together() -> None:
    ASKED.clear()
    fetching = RequestFetcher(Slow(timeout_s=15.0), total_s=7.0, clock=lambda: NOW_S[0])
    for _ in range(3):
        assert fetching.fetch("https://images.test/") == b"bytes"
    assert ASKED == [7.0, 4.0, 1.0]  # the last one gets what is left
    with pytest.raises(BadImage, match="images before it took all of the 7 s"):
        fetching.fetch("https://images.test/")
    assert len(ASKED) == 3
