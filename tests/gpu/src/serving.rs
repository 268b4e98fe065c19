//! Serves the shipped model over HTTP. A conductor with its workers gets all questions of the oracle file at once, and
//! must give the reference's answers.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Bundle;
use crate::child::{command, start, wait};
use crate::report::Report;

/// Interval between requests to `/ready`.
const INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time that the conductor may take to stop.
const END: Duration = Duration::from_secs(30);
/// Number of questions in a short run.
const SHORT: usize = 4;

pub fn run(bundle: &Bundle, report: &mut Report) {
    let log = bundle.path("conductor.log");
    let served = serve(bundle, report);
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    for device in text.lines().filter_map(|line| line.split_once("weights, on cuda, ")) {
        report.device(device.1.split('"').next().unwrap_or_default());
    }
    let (passed, why) = match served {
        Ok(()) => (true, String::new()),
        Err(error) => (false, format!("{error}\n{text}")),
    };
    report.check("serving", "the conductor starts, answers and ends", passed, &why);
}

fn serve(bundle: &Bundle, report: &mut Report) -> io::Result<()> {
    let oracle = std::fs::read(bundle.path("tutti-tiny/oracle.json"))?;
    let mut questions: Vec<Value> = serde_json::from_slice(&oracle)?;
    if bundle.short {
        questions.truncate(SHORT);
    }
    // The listener closes at once, so the port is free for the conductor.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut conductor = command(bundle, "conductor");
    conductor
        .args(["--device", "cuda", "--grpc", "127.0.0.1:0", "--http", &address.to_string()])
        .args(["--workers", &bundle.workers.to_string()])
        .arg("--model")
        .arg(bundle.path("tutti-tiny"));
    let mut child = start(conductor, &bundle.path("conductor.log"))?;
    let asked = ready(&mut child, address, bundle.deadline).map(|()| ask_all(address, &questions, report));
    if child.try_wait()?.is_none() {
        interrupt(&child)?;
    }
    match (asked, wait(&mut child, Instant::now() + END)?) {
        (Err(error), _) => Err(error),
        (Ok(()), Some(true)) => Ok(()),
        (Ok(()), _) => Err(io::Error::other("the conductor does not end with 0")),
    }
}

/// Waits until the conductor answers `/ready` with 200.
fn ready(child: &mut Child, address: SocketAddr, deadline: Instant) -> io::Result<()> {
    loop {
        if matches!(request(address, "GET", "/ready", ""), Ok((200, _))) {
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("the conductor has ended: {status}")));
        }
        if Instant::now() >= deadline {
            return Err(io::Error::other("the conductor is not ready at the time limit"));
        }
        thread::sleep(INTERVAL);
    }
}

/// Asks all questions at once, each on a thread of its own.
fn ask_all(address: SocketAddr, questions: &[Value], report: &mut Report) {
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = questions.iter().map(|question| scope.spawn(|| ask(address, question))).collect();
        asked.into_iter().map(|thread| thread.join().unwrap_or(Err("a panic".to_owned()))).collect()
    });
    for (question, answer) in questions.iter().zip(answers) {
        let name = question["prompt"].as_str().or(question["messages"][0]["content"].as_str()).unwrap_or("?");
        let wanted = question["answer"].as_str().or(question["completion"].as_str()).unwrap_or_default();
        let (passed, got) = match answer {
            Ok(text) => (text == wanted, text),
            Err(error) => (false, error),
        };
        report.check("serving", name, passed, &format!("{got:?}, the reference has {wanted:?}"));
    }
}

/// Asks a question and returns the text of the answer.
fn ask(address: SocketAddr, question: &Value) -> Result<String, String> {
    let mut body = json!({ "temperature": 0, "max_tokens": 200 });
    let (path, key) = match question.get("messages") {
        Some(_) => ("/v1/chat/completions", "messages"),
        None => ("/v1/completions", "prompt"),
    };
    body[key] = question[key].clone();
    let (status, answer) =
        request(address, "POST", path, &body.to_string()).map_err(|error| error.to_string())?;
    let answer: Value = serde_json::from_str(&answer).map_err(|error| format!("{error}: {answer}"))?;
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().or(choice["text"].as_str());
    text.map(str::to_owned).ok_or_else(|| format!("status {status}: {answer}"))
}

/// Sends one request on a new connection. Returns the status and the body.
fn request(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no answer"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| io::Error::other("no status"))?, body.to_owned()))
}

/// Sends SIGINT, as Ctrl-C does. The standard library can only send SIGKILL, so a shell runs `kill`.
fn interrupt(child: &Child) -> io::Result<()> {
    Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().map(drop)
}
