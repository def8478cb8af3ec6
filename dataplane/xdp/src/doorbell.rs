//! Waking a worker that sleeps in poll(2): an eventfd that is written only when somebody listens.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use vipgate_dataplane::link::handoff::Wake;

/// One worker's bell.
#[derive(Debug)]
pub struct Doorbell {
    event: OwnedFd,
    listening: AtomicBool,
}

impl Doorbell {
    /// A bell that nobody listens to yet.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was made just now and belongs to nobody else.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { event, listening: AtomicBool::new(false) })
    }

    /// Listens from now on. After this, look once more for work before sleeping: what came earlier rang no bell.
    pub fn listen(&self) {
        self.listening.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`: either the waker sees that we listen, or we see what it brought.
        fence(Ordering::SeqCst);
    }

    /// Listens no more, and forgets rings that came meanwhile.
    pub fn ignore(&self) {
        self.listening.store(false, Ordering::Relaxed);
        let mut count = 0_u64;
        // SAFETY: `count` has the eight bytes that reading an eventfd writes. An error means that nobody has rung.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// The descriptor that becomes readable when somebody rings.
    pub(crate) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl Wake for Doorbell {
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.listening.swap(false, Ordering::Relaxed) {
            let one = 1_u64;
            // SAFETY: eight bytes are read from `one`. The counter can't overflow: one ring a sleep.
            unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }
}
