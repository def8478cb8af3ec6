//! Log lines to a file descriptor: no full disk, closed pipe or stopped reader ends or holds up who logs. A line that
//! can't be written is dropped and counted.
//!
//! The process may share its stderr with others, so it can't be non-blocking. A line is written in pieces, each when
//! poll(2) says that the descriptor is writable: pipes and sockets then take it at once.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::{Errno, write};

/// How long a line waits for a busy reader: lines in a burst fit into its pipe again soon.
const MAX_WAIT: Duration = Duration::from_millis(50);
/// Lines wait at most once in this time, so a reader that is too slow costs little more than one that has stopped.
const WAIT_INTERVAL: Duration = Duration::from_secs(1);
/// When to try again while a terminal takes nothing.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Bytes of a piece: `PIPE_BUF`, which a writable pipe or socket takes whole.
const MAX_PIECE: usize = 4096;

/// Writes lines to a file descriptor, one after the other.
#[derive(Debug)]
pub(super) struct LineWriter<F> {
    fd: F,
    state: Mutex<State>,
    lost: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Until then lines don't wait.
    next_wait: Option<Instant>,
    /// The last line was written in part.
    is_torn: bool,
}

impl<F: AsFd> LineWriter<F> {
    pub(super) fn new(fd: F) -> Self {
        Self { fd, state: Mutex::default(), lost: AtomicU64::new(0) }
    }

    /// The number of lines that couldn't be written.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Writes a line, which ends with a newline, or counts it as lost.
    pub(super) fn put(&self, line: &[u8]) {
        let mut state = self.state();
        let start = Instant::now();
        let may_wait = state.next_wait.is_none_or(|next| start >= next);
        let deadline = if may_wait { start + MAX_WAIT } else { start };
        // After a part of another line, this one begins on a line of its own.
        let bytes = if state.is_torn { Cow::Owned([b"\n".as_slice(), line].concat()) } else { Cow::Borrowed(line) };
        let written = self.write(&bytes, deadline, &mut state);
        if written == bytes.len() {
            state.is_torn = false;
        } else {
            state.is_torn |= written > 0;
            self.lost.fetch_add(1, Relaxed);
        }
    }

    /// Writes the last line of a process, which waits for its reader whatever happened before.
    pub(super) fn put_last(&self, line: &[u8]) {
        self.state().next_wait = None;
        self.put(line);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes until the deadline; returns the number of bytes written.
    fn write(&self, bytes: &[u8], deadline: Instant, state: &mut State) -> usize {
        let mut written = 0;
        while let Some(piece) = bytes.get(written..).and_then(|rest| rest.chunks(MAX_PIECE).next()) {
            if !self.wait(deadline, state) {
                break;
            }
            match write(&self.fd, piece) {
                Ok(count) if count > 0 => written += count,
                Err(Errno::INTR) => {}
                // A terminal has less space than poll(2) says.
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    state.next_wait = Some(Instant::now() + WAIT_INTERVAL);
                    thread::sleep(RETRY_INTERVAL);
                }
                Ok(_) | Err(_) => break,
            }
        }
        written
    }

    /// Waits until the descriptor is writable, or writing fails at once; false: not before the deadline.
    fn wait(&self, deadline: Instant, state: &mut State) -> bool {
        let mut left = Duration::ZERO;
        // More than once only if a signal interrupts the wait.
        while !self.is_writable(left) {
            left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state.next_wait = Some(Instant::now() + WAIT_INTERVAL);
        }
        true
    }

    fn is_writable(&self, timeout: Duration) -> bool {
        let timeout = Timespec::try_from(timeout).unwrap_or_default();
        match poll(&mut [PollFd::new(&self.fd, PollFlags::OUT)], Some(&timeout)) {
            Ok(ready) => ready > 0,
            // Any other error says nothing about the descriptor.
            Err(error) => error != Errno::INTR,
        }
    }
}

/// The process's stderr. A terminal is opened again, as non-blocking: poll(2) says that it is writable also if it takes
/// only a part of a line.
#[derive(Debug)]
pub(super) enum Stderr {
    Inherited(io::Stderr),
    Terminal(File),
}

impl Stderr {
    pub(super) fn open() -> Self {
        let stderr = io::stderr();
        if stderr.is_terminal() {
            let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
            if let Ok(terminal) = OpenOptions::new().write(true).custom_flags(flags).open("/proc/self/fd/2") {
                return Self::Terminal(terminal);
            }
        }
        Self::Inherited(stderr)
    }
}

impl AsFd for Stderr {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Inherited(stderr) => stderr.as_fd(),
            Self::Terminal(terminal) => terminal.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read as _, pipe};

    use super::*;

    const LINE: &[u8] = b"a line\n";

    /// Fills the pipe.
    fn fill<F: AsFd>(writer: &LineWriter<F>) {
        while writer.is_writable(Duration::ZERO) {
            writer.put(&[b'x'; MAX_PIECE]);
        }
        assert_eq!(writer.lost(), 0);
    }

    /// What is left in a pipe whose writers are closed.
    fn rest(mut reader: PipeReader) -> String {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn a_full_disk_and_a_closed_pipe_lose_lines_and_nothing_else() {
        let full = LineWriter::new(OpenOptions::new().write(true).open("/dev/full").unwrap());
        let (reader, pipe) = pipe().unwrap();
        drop(reader);
        let closed = LineWriter::new(pipe);
        for lines in 1..=3 {
            full.put(LINE);
            closed.put(LINE);
            assert_eq!((full.lost(), closed.lost()), (lines, lines));
        }
    }

    #[test]
    fn a_reader_that_has_stopped_holds_up_one_line_at_most() {
        let (reader, pipe) = pipe().unwrap();
        let writer = LineWriter::new(pipe);
        fill(&writer);
        let (start, mut lines) = (Instant::now(), 0);
        while start.elapsed() < WAIT_INTERVAL / 2 {
            writer.put(LINE);
            lines += 1;
        }
        assert!(lines > 20, "only {lines} lines in {:?}", start.elapsed());
        assert_eq!(writer.lost(), lines);
        drop(reader);
    }

    #[test]
    fn a_line_waits_for_a_busy_reader() {
        let is_written = || {
            let (mut reader, pipe) = pipe().unwrap();
            let writer = LineWriter::new(pipe);
            fill(&writer);
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(RETRY_INTERVAL);
                    reader.read_exact(&mut [0; MAX_PIECE]).unwrap();
                });
                writer.put_last(LINE);
            });
            let is_written = writer.lost() == 0;
            drop(writer);
            is_written && rest(reader).ends_with("xa line\n")
        };
        // On a loaded machine the reader may be later than a line waits.
        assert!((0..50).any(|_| is_written()));
    }

    #[test]
    fn a_line_after_a_torn_one_begins_on_a_line_of_its_own() {
        let (mut reader, pipe) = pipe().unwrap();
        let writer = LineWriter::new(pipe);
        // Longer than the pipe.
        writer.put(&b"y".repeat(1 << 20));
        assert_eq!(writer.lost(), 1);
        reader.read_exact(&mut [0; MAX_PIECE]).unwrap();
        writer.put(LINE);
        assert_eq!(writer.lost(), 1);
        drop(writer);
        assert!(rest(reader).ends_with("y\na line\n"));
    }
}
