use std::{
    io::Read,
    os::unix::net::UnixStream,
    sync::mpsc::{SyncSender, sync_channel},
};

use super::*;

/// A writer that waits for a permission to write each line.
struct Stuck {
    permission: std::sync::mpsc::Receiver<()>,
    out: UnixStream,
}

impl Write for Stuck {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.permission.recv();
        self.out.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn stuck(room: usize) -> (LogQueue, SyncSender<()>, UnixStream) {
    let (permit, permission) = sync_channel(1000);
    let (out, read) = UnixStream::pair().unwrap();
    (LogQueue::new(room, Stuck { permission, out }).unwrap(), permit, read)
}

#[test]
fn lines_without_room_are_lost_and_counted_and_the_others_come_in_order() {
    let (queue, permit, mut read) = stuck(100);
    for number in 0..1000 {
        queue.make_writer().write_all(format!("line {number:4}\n").as_bytes()).unwrap();
    }
    assert_eq!(queue.0.lost.get(), 990);
    // Nobody reads, so the flush ends by its timeout.
    queue.flush(Duration::from_millis(1));
    (0..10).for_each(|_| permit.send(()).unwrap());
    queue.flush(Duration::from_secs(60));
    let mut lines = [0; 100];
    read.read_exact(&mut lines).unwrap();
    let expected: String = (0..10).map(|number| format!("line {number:4}\n")).collect();
    assert_eq!(String::from_utf8(lines.to_vec()).unwrap(), expected);
    // The queue has room again.
    queue.make_writer().write_all(b"more\n").unwrap();
    assert_eq!(queue.0.lost.get(), 990);
    permit.send(()).unwrap();
    queue.flush(Duration::from_secs(60));
    assert_eq!(queue.0.state.lock().bytes, 0);
}
