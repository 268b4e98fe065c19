//! A process that may open no more files. This test has its own binary, because the limit applies to the whole process.

use std::{fs::File, time::Duration};

use axum::{Router, routing::get};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    time::{ClockId, clock_gettime},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    time::{sleep, timeout},
};
use tutti_runtime::{descriptors, serve, shutdown::Shutdown};
use tutti_settings::ConnectionSettings;

const SOON: Duration = Duration::from_secs(20);

/// CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

async fn answered(mut client: TcpStream) -> std::io::Result<()> {
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await?;
    assert!(answer.starts_with(b"HTTP/1.1 200"));
    Ok(())
}

#[tokio::test]
async fn without_descriptors_the_accept_loop_pauses_and_goes_on_later() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum }).unwrap();
    descriptors::raise_limit();
    assert_eq!(getrlimit(Resource::Nofile).current, maximum, "the limit was not raised");
    setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum }).unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = Router::new().route("/", get(|| async {}));
    tokio::spawn(serve::http(listener, routes, ConnectionSettings::default(), Shutdown::default()));
    timeout(SOON, answered(TcpStream::connect(address).await.unwrap())).await.unwrap().unwrap();
    // The client's socket is created before the descriptors run out, so that only the server lacks one.
    let client = TcpSocket::new_v4().unwrap();
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    let client = client.connect(address).await.unwrap();
    let before = cpu_time();
    sleep(Duration::from_secs(1)).await;
    let used = cpu_time() - before;
    assert!(used < Duration::from_millis(300), "the accept loop used {used:?} of a second");
    drop(files);
    timeout(SOON, answered(client)).await.unwrap().unwrap();
}
