use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tutti_proto::cluster::v1::MediaKind;
use tutti_runtime::ErrorKind;

use super::{
    super::tests::{PICTURE, decode_with, held, item, pool},
    *,
};

/// A server of files on this machine, which counts the requests.
struct Server {
    origin: String,
    asked: Arc<AtomicUsize>,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::<AtomicUsize>::default();
        let count = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(answer(stream));
            }
        });
        Self { origin, asked }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn at(&self, path: &str) -> Media {
        at(&format!("{}{path}", self.origin))
    }

    /// Limits that allow this server.
    fn limits(&self) -> RouterSettings {
        RouterSettings { media_origins: vec![self.origin.clone()], ..RouterSettings::default() }
    }
}

fn at(url: &str) -> Media {
    Media { url: Some(Url::parse(url).unwrap()), ..item(MediaKind::Image, "", Vec::new()) }
}

/// Answers one request, and closes the connection.
async fn answer(mut stream: TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let path = String::from_utf8(head).unwrap().split(' ').nth(1).unwrap().to_owned();
    let length = PICTURE.len();
    let (head, body) = match path.as_str() {
        "/picture" => (format!("200 OK\r\nContent-Length: {length}"), PICTURE),
        "/unknown-length" => ("200 OK".into(), PICTURE),
        "/cut" => (format!("200 OK\r\nContent-Length: {}", length + 1), PICTURE),
        "/text" => ("200 OK\r\nContent-Length: 5".into(), &b"hello"[..]),
        "/large" => ("200 OK\r\nContent-Length: 99999999999".into(), &b""[..]),
        "/redirect" => ("302 Found\r\nLocation: /picture\r\nContent-Length: 0".into(), &b""[..]),
        "/slow" => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf").await.unwrap();
            // Until the client has left.
            let _ = stream.read_u8().await;
            return;
        }
        _ => ("404 Not Found\r\nContent-Length: 0".into(), &b""[..]),
    };
    let head = format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body).await;
}

#[tokio::test]
async fn a_picture_of_an_allowed_origin_is_fetched_once_and_is_the_one_that_is_sent() {
    let (server, pool) = (Server::start().await, pool(|_| {}));
    let sent =
        decode_with(&pool, vec![item(MediaKind::Image, "jpeg", vec![PICTURE.to_vec()])], server.limits());
    let sent = sent.await.unwrap();
    let before = held(&pool);
    for path in ["/picture", "/unknown-length"] {
        let fetched = decode_with(&pool, vec![server.at(path)], server.limits()).await.unwrap();
        assert_eq!(fetched.items[0].item, sent.items[0].item);
        assert_eq!(held(&pool), 2 * before, "only the canonical form holds memory");
    }
    assert_eq!(server.asked(), 2);
    drop(sent);
    assert_eq!(held(&pool), 0);
}

#[tokio::test]
async fn other_origins_are_refused_by_the_setting_s_name_and_not_asked() {
    let (server, pool) = (Server::start().await, pool(|_| {}));
    let other = Server::start().await;
    let port = server.origin.rsplit(':').next().unwrap();
    for url in [
        format!("{}/picture", other.origin),
        format!("https://127.0.0.1:{port}/picture"),
        format!("http://localhost:{port}/picture"),
        "http://127.0.0.1/picture".into(),
        "http://169.254.169.254/latest/meta-data".into(),
    ] {
        let error = decode_with(&pool, vec![at(&url)], server.limits()).await.err().unwrap();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidArgument, Some("media[0].url")),
            "{url}"
        );
        assert!(error.message().contains("not in media_origins"), "{error:?}");
    }
    let error =
        decode_with(&pool, vec![server.at("/picture")], RouterSettings::default()).await.err().unwrap();
    assert!(error.message().contains("not in media_origins"), "{error:?}");
    let named = server.origin.replace("http://", "http://name:word@");
    let error = decode_with(&pool, vec![at(&named)], server.limits()).await.err().unwrap();
    assert!(error.message().contains("password"), "{error:?}");
    assert_eq!((server.asked(), other.asked()), (0, 0));
}

#[tokio::test]
async fn what_is_no_whole_picture_in_time_is_refused_and_leaves_no_memory() {
    let (server, pool) = (Server::start().await, pool(|_| {}));
    let small = RouterSettings { max_body_bytes: PICTURE.len() - 1, ..server.limits() };
    let hasty = RouterSettings { media_fetch_timeout_ms: 50, ..server.limits() };
    for (path, limits, field, words) in [
        ("/text", server.limits(), "media[0]", ""),
        ("/none", server.limits(), "media[0].url", "answers 404"),
        ("/redirect", server.limits(), "media[0].url", "a redirect, which is not followed"),
        ("/cut", server.limits(), "media[0].url", "to its end"),
        ("/large", server.limits(), "media[0].url", "max_body_bytes"),
        ("/picture", small.clone(), "media[0].url", "max_body_bytes"),
        ("/unknown-length", small.clone(), "media[0].url", "max_body_bytes"),
        ("/slow", hasty, "media[0].url", "within 50 ms (media_fetch_timeout_ms)"),
    ] {
        let error = decode_with(&pool, vec![server.at(path)], limits).await.err().unwrap();
        assert_eq!(
            (error.kind(), error.field()),
            (ErrorKind::InvalidArgument, Some(field)),
            "{path}: {error:?}"
        );
        assert!(error.message().contains(words), "{path}: {error:?}");
        assert_eq!(held(&pool), 0, "{path}");
    }
    assert_eq!(server.asked(), 8, "a redirect is not followed");
    // All files of a request share the limit of bytes.
    let both = RouterSettings { max_body_bytes: 2 * PICTURE.len() - 1, ..server.limits() };
    let files = || vec![server.at("/picture"), server.at("/picture")];
    let error = decode_with(&pool, files(), both).await.err().unwrap();
    assert!(error.message().contains("max_body_bytes"), "{error:?}");
    assert_eq!(decode_with(&pool, files(), server.limits()).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn a_file_without_room_in_memory_is_refused_for_now() {
    let server = Server::start().await;
    let small = pool(|settings| settings.max_media_memory = PICTURE.len() / 2);
    let error = decode_with(&small, vec![server.at("/picture")], server.limits()).await.err().unwrap();
    assert!(error.message().contains("memory") || error.message().contains("bytes"), "{error:?}");
    assert_eq!(held(&small), 0);
}

#[tokio::test]
async fn a_name_of_this_machine_is_resolved_only_if_it_says_so() {
    let found = PublicAddresses.resolve("localhost".parse().unwrap()).await;
    assert!(found.is_ok_and(|mut addresses| addresses.all(|address| address.ip().is_loopback())));
    // A literal address as a name is looked up without any server of names.
    for host in ["127.0.0.1", "10.0.0.1"] {
        let refused = PublicAddresses.resolve(host.parse().unwrap()).await.err().unwrap();
        assert!(refused.to_string().contains("not public"), "{refused}");
    }
    assert!(PublicAddresses.resolve("8.8.8.8".parse().unwrap()).await.is_ok());
}

#[test]
fn addresses_that_only_some_machines_reach_are_not_public() {
    for private in [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2001::1",
        "2001:db8::1",
        "2002:a00:1::",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ] {
        assert!(!is_public(private.parse().unwrap()), "{private}");
    }
    for public in [
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.1",
        "172.15.0.1",
        "172.32.0.1",
        "192.0.1.1",
        "198.17.0.1",
        "198.20.0.1",
        "223.255.255.255",
        "2606:4700::1111",
        "2001:4860:4860::8888",
        "2002:808:808::",
        "64:ff9b::808:808",
    ] {
        assert!(is_public(public.parse().unwrap()), "{public}");
    }
}
