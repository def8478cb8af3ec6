//! Putting the steering program on interfaces, and what stays there when the process ends.
//!
//! `on_exit: drop` attaches by netlink: the program stays until the next gateway replaces it in one step, or
//! `vipgate detach` takes it away. Its table of sockets empties itself when the process dies, so what it captures is
//! dropped. `on_exit: pass` attaches by a BPF link, which the kernel takes away with the process, however it ends.

use std::io;

use aya::programs::XdpMode;
use thiserror::Error;

use crate::nic::Nic;
pub use crate::program::Mode;
use crate::program::{self, Attached};
use crate::steering::{Steering, SteeringError, chain};

/// How the program is to be run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModeWish {
    /// By the driver where it can, else by the kernel's stack.
    #[default]
    Auto,
    /// By the driver, or fail.
    Native,
    /// By the kernel's stack.
    Generic,
}

/// What becomes of captured traffic while no gateway runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExit {
    /// It is dropped.
    #[default]
    Drop,
    /// The kernel gets it.
    Pass,
}

/// The program can't be put on an interface, or taken away.
#[derive(Debug, Error)]
pub enum AttachError {
    /// Somebody else's program is there.
    #[error(
        "interface {interface}: another XDP program is attached ({name}, id {id}); remove it first: \
             `ip link set dev {interface} xdp off`"
    )]
    Foreign {
        /// The interface's name.
        interface: String,
        /// What the program is called.
        name: String,
        /// The kernel's number of it.
        id: u32,
    },
    /// The kernel refused.
    #[error("interface {interface}: cannot {what}: {reason}")]
    Refused {
        /// The interface's name.
        interface: String,
        /// What was tried.
        what: &'static str,
        /// What the kernel says.
        reason: String,
    },
    /// The program itself is broken.
    #[error(transparent)]
    Steering(#[from] SteeringError),
}

/// Puts the program on all interfaces, or on none. Returns how it is run on each.
///
/// # Errors
/// When one of them refuses; those that have it already are left as they were.
pub fn attach(
    steering: &mut Steering,
    interfaces: &[Nic],
    wish: ModeWish,
    on_exit: OnExit,
) -> Result<Vec<Mode>, AttachError> {
    let mut done: Vec<(&Nic, Mode, Option<Attached>)> = Vec::new();
    for nic in interfaces {
        match attach_one(steering, nic, wish, on_exit) {
            Ok((mode, before)) => done.push((nic, mode, before)),
            Err(error) => {
                undo(done);
                return Err(error);
            }
        }
    }
    Ok(done.into_iter().map(|(_, mode, _)| mode).collect())
}

fn attach_one(
    steering: &mut Steering,
    nic: &Nic,
    wish: ModeWish,
    on_exit: OnExit,
) -> Result<(Mode, Option<Attached>), AttachError> {
    let before = find(nic)?;
    let modes: &[Mode] = match wish {
        ModeWish::Native => &[Mode::Native],
        ModeWish::Auto if nic.native_xdp => &[Mode::Native, Mode::Generic],
        ModeWish::Auto | ModeWish::Generic => &[Mode::Generic],
    };
    let mut refusal = String::new();
    for &mode in modes {
        let result = match on_exit {
            OnExit::Drop => attach_for_good(steering, nic, mode, before.as_ref())?,
            OnExit::Pass => attach_for_process(steering, nic, mode, before.as_ref())?,
        };
        match result {
            Ok(()) => return Ok((mode, before)),
            Err(reason) => refusal = format!("{reason} ({} mode)", mode.name()),
        }
    }
    // What was detached to make room comes back: closed stays closed.
    if let Some(before) = before.filter(|_| matches!(program::find(nic.ifindex), Ok(None)))
        && let Err(error) = program::put_back(nic.ifindex, &before)
    {
        tracing::warn!(interface = nic.name, %error, "could not restore the XDP program that was here before");
    }
    Err(AttachError::Refused { interface: nic.name.clone(), what: "attach the steering program", reason: refusal })
}

fn attach_for_good(
    steering: &Steering,
    nic: &Nic,
    mode: Mode,
    before: Option<&Attached>,
) -> Result<Result<(), String>, AttachError> {
    // A program can be replaced only by one of the same mode.
    if let Some(other) = before.filter(|before| before.mode != mode) {
        program::detach(nic.ifindex, other).map_err(|error| refused(nic, "change the XDP mode", &error))?;
    }
    let old = before.filter(|before| before.mode == mode);
    Ok(program::attach(nic.ifindex, steering.program_fd()?, mode, old).map_err(|error| explain(&error)))
}

fn attach_for_process(
    steering: &mut Steering,
    nic: &Nic,
    mode: Mode,
    before: Option<&Attached>,
) -> Result<Result<(), String>, AttachError> {
    // A link can't take the place of a program that was attached by netlink.
    if let Some(before) = before {
        program::detach(nic.ifindex, before)
            .map_err(|error| refused(nic, "remove what an earlier gateway left", &error))?;
    }
    let mode = match mode {
        Mode::Native => XdpMode::Driver,
        Mode::Generic => XdpMode::Skb,
    };
    Ok(steering.program_mut()?.attach_to_if_index(nic.ifindex, mode).map(|_| ()).map_err(|error| chain(&error)))
}

/// What is on an interface where the steering program should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The steering program of this process.
    Attached,
    /// Nothing.
    Missing,
    /// Another program.
    Replaced {
        /// The kernel's number of it; its name takes a capability that a gateway gives up after its start.
        id: u32,
    },
}

/// Looks what is on an interface now.
///
/// # Errors
/// When the kernel can't be asked, or the interface is gone.
pub fn presence(steering: &Steering, ifindex: u32) -> io::Result<Presence> {
    Ok(match program::query(ifindex)? {
        None => Presence::Missing,
        Some((id, _)) if id == steering.program_id() => Presence::Attached,
        Some((id, _)) => Presence::Replaced { id },
    })
}

/// Puts the program on an interface again, in the mode in which it was there, and in place of whatever is there now.
///
/// # Errors
/// When the kernel refuses.
pub fn put_back(steering: &mut Steering, nic: &Nic, mode: Mode, on_exit: OnExit) -> Result<(), AttachError> {
    let there = program::query(nic.ifindex).map_err(|error| refused(nic, "ask for its XDP program", &error))?;
    // Programs of two modes exclude each other, and so do a program that is there by netlink and a link.
    if let Some((_, other)) = there.filter(|(_, other)| *other != mode || on_exit == OnExit::Pass) {
        program::clear(nic.ifindex, other).map_err(|error| refused(nic, "remove another XDP program", &error))?;
    }
    let result = match on_exit {
        OnExit::Drop => program::overwrite(nic.ifindex, steering.program_fd()?, mode).map_err(|error| explain(&error)),
        OnExit::Pass => attach_for_process(steering, nic, mode, None)?,
    };
    result.map_err(|reason| AttachError::Refused {
        interface: nic.name.clone(),
        what: "attach the steering program again",
        reason,
    })
}

/// Takes the program away from those that have it only since now; elsewhere the earlier one comes back.
fn undo(done: Vec<(&Nic, Mode, Option<Attached>)>) {
    for (nic, mode, before) in done {
        let result = program::find(nic.ifindex).and_then(|now| match (now, before) {
            (Some(now), Some(before)) => program::restore(nic.ifindex, &before, mode, &now),
            (Some(now), None) => program::detach(nic.ifindex, &now),
            (None, _) => Ok(()),
        });
        if let Err(error) = result {
            tracing::warn!(interface = nic.name, %error, "could not restore the XDP program that was here before");
        }
    }
}

/// Takes what a gateway left in place away from an interface; says whether there was anything.
///
/// # Errors
/// When somebody else's program is there, or the kernel refuses.
pub fn detach(nic: &Nic) -> Result<bool, AttachError> {
    let Some(attached) = find(nic)? else { return Ok(false) };
    program::detach(nic.ifindex, &attached).map_err(|error| refused(nic, "detach the steering program", &error))?;
    Ok(true)
}

/// Whether an interface has a steering program of ours, which [`detach`] would remove.
///
/// # Errors
/// When somebody else's program is there, or the kernel refuses.
pub fn is_attached(nic: &Nic) -> Result<bool, AttachError> {
    Ok(find(nic)?.is_some())
}

/// The program of an earlier gateway, if there is one.
fn find(nic: &Nic) -> Result<Option<Attached>, AttachError> {
    let found = program::find(nic.ifindex).map_err(|error| refused(nic, "ask for its XDP program", &error))?;
    match found {
        Some(foreign) if !foreign.is_ours() => {
            Err(AttachError::Foreign { interface: nic.name.clone(), name: foreign.name, id: foreign.id })
        }
        found => Ok(found),
    }
}

fn refused(nic: &Nic, what: &'static str, error: &io::Error) -> AttachError {
    AttachError::Refused { interface: nic.name.clone(), what, reason: explain(error) }
}

fn explain(error: &io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; vipgate needs root, or CAP_NET_ADMIN, and CAP_SYS_ADMIN where an earlier gateway's program is to be replaced"
        }
        Some(libc::EBUSY) => "; another process holds an XDP program on it: is a gateway running here already?",
        Some(libc::EOPNOTSUPP) => "; the driver has no XDP of its own: set `xdp.mode: generic`",
        Some(libc::ERANGE | libc::EINVAL) => "; the interface's MTU may be too large for XDP, or its queues too few",
        _ => "",
    };
    format!("{error}{hint}")
}
