//! Doorbell: wakes a worker that sleeps in poll(2), by an eventfd that is written only while it is armed.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use vipgate_dataplane::io::handoff::Wake;

/// The doorbell of one worker.
#[derive(Debug)]
pub struct Doorbell {
    event: OwnedFd,
    is_armed: AtomicBool,
}

impl Doorbell {
    /// A disarmed doorbell.
    ///
    /// # Errors
    /// When the process has reached its limit of file descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the file descriptor is new and has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { event, is_armed: AtomicBool::new(false) })
    }

    /// Arms the doorbell. The worker must check for work once more before sleeping: earlier work caused no wakeup.
    pub fn arm(&self) {
        self.is_armed.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`: either the waker sees the armed flag, or the worker sees the waker's work.
        fence(Ordering::SeqCst);
    }

    /// Disarms the doorbell and clears pending wakeups.
    pub fn disarm(&self) {
        self.is_armed.store(false, Ordering::Relaxed);
        let mut count = 0_u64;
        // SAFETY: reading an eventfd writes eight bytes, the size of `count`. An error means that no wakeup is pending.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// File descriptor that is readable after a wakeup.
    pub(crate) fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl Wake for Doorbell {
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.is_armed.swap(false, Ordering::Relaxed) {
            let one = 1_u64;
            // SAFETY: eight bytes are read from `one`. The counter can't overflow: one wakeup per sleep.
            unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }
}
