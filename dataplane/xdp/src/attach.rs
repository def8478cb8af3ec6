//! Attachment of the steering program to interfaces, and its lifetime.
//!
//! `on_exit: drop` attaches by netlink: the program stays until the next gateway replaces it atomically, or
//! `vipgate detach` removes it. Its XSKMAP is empty after the process has exited, so captured packets are dropped.
//! `on_exit: pass` attaches by a BPF link, which the kernel removes when the process exits for any reason.

use std::error::Error;
use std::io;

use aya::programs::XdpMode;

use crate::nic::Nic;
use crate::program::{self, AttachedProgram};
pub use crate::program::{Mode, ProgramStatus};
use crate::steering::{Steering, SteeringError, error_chain, raw_os_error};

/// Configured XDP mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModePreference {
    /// Native if the driver supports it, otherwise generic.
    #[default]
    Auto,
    /// Native, or fail.
    Native,
    Generic,
}

/// Handling of captured traffic while no gateway runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExit {
    /// Dropped.
    #[default]
    Drop,
    /// Passed to the kernel.
    Pass,
}

/// Attaches the program to all interfaces, or to none. Returns the mode on each.
///
/// # Errors
/// When one of them fails; earlier ones are restored.
pub fn attach(
    steering: &mut Steering,
    interfaces: &[Nic],
    preference: ModePreference,
    on_exit: OnExit,
) -> Result<Vec<Mode>, SteeringError> {
    let mut attached: Vec<(&Nic, Mode, Option<AttachedProgram>)> = Vec::new();
    for nic in interfaces {
        match attach_one(steering, nic, preference, on_exit) {
            Ok((mode, previous)) => attached.push((nic, mode, previous)),
            Err(error) => {
                roll_back(attached);
                return Err(error);
            }
        }
    }
    Ok(attached.into_iter().map(|(_, mode, _)| mode).collect())
}

fn attach_one(
    steering: &mut Steering,
    nic: &Nic,
    preference: ModePreference,
    on_exit: OnExit,
) -> Result<(Mode, Option<AttachedProgram>), SteeringError> {
    let previous = find(nic)?;
    let modes: &[Mode] = match preference {
        ModePreference::Native => &[Mode::Native],
        ModePreference::Auto if nic.native_xdp => &[Mode::Native, Mode::Generic],
        ModePreference::Auto | ModePreference::Generic => &[Mode::Generic],
    };
    let attached = attach_in_first_supported(nic, modes, |mode| match on_exit {
        OnExit::Drop => attach_by_netlink(steering, nic, mode, previous.as_ref()),
        OnExit::Pass => attach_by_link(steering, nic, mode, previous.as_ref()),
    });
    match attached {
        Ok(mode) => Ok((mode, previous)),
        Err(error) => {
            restore_detached(nic, previous);
            Err(error)
        }
    }
}

/// Attaches the program in the first of these modes that is supported. Other errors end the search: they may be gone
/// after a restart, and in generic mode the gateway would be slower for as long as it runs.
fn attach_in_first_supported(
    nic: &Nic,
    modes: &[Mode],
    mut attach: impl FnMut(Mode) -> Result<Attempt, SteeringError>,
) -> Result<Mode, SteeringError> {
    let refused =
        |reason| SteeringError::Refused { interface: nic.name.clone(), what: "attach the steering program", reason };
    let mut failure = String::new();
    for &mode in modes {
        match attach(mode)? {
            Attempt::Attached => return Ok(mode),
            Attempt::Unsupported(reason) => {
                if modes.last() != Some(&mode) {
                    tracing::warn!(
                        interface = nic.name,
                        reason,
                        "the driver refuses the steering program; using generic mode"
                    );
                }
                failure = format!("{reason} ({} mode)", mode.name());
            }
            Attempt::Failed(reason) => return Err(refused(format!("{reason} ({} mode)", mode.name()))),
        }
    }
    Err(refused(failure))
}

/// Restores a program that was detached for another mode, so that the interface stays closed.
fn restore_detached(nic: &Nic, previous: Option<AttachedProgram>) {
    if let Some(previous) = previous.filter(|_| matches!(program::find(nic.ifindex), Ok(None)))
        && let Err(error) = program::reattach(nic.ifindex, &previous)
    {
        tracing::warn!(interface = nic.name, %error, "cannot restore the previous XDP program");
    }
}

/// Errors with which the kernel or a driver says that it doesn't support a mode, at this MTU and with these queues:
/// veth returns `ENOSPC` for too few queues.
const UNSUPPORTED: [i32; 5] = [libc::EOPNOTSUPP, libc::EINVAL, libc::ERANGE, libc::E2BIG, libc::ENOSPC];

/// Outcome of attaching in one mode.
#[derive(Debug)]
enum Attempt {
    Attached,
    /// The kernel doesn't support this mode, for this reason; it may support another one.
    Unsupported(String),
    /// It fails for this reason, whatever the mode.
    Failed(String),
}

impl Attempt {
    fn of<T, E: Error + 'static>(result: Result<T, E>, reason: impl FnOnce(&E) -> String) -> Self {
        match result {
            Ok(_) => Self::Attached,
            Err(error) if raw_os_error(&error).is_some_and(|number| UNSUPPORTED.contains(&number)) => {
                Self::Unsupported(reason(&error))
            }
            Err(error) => Self::Failed(reason(&error)),
        }
    }
}

/// Attaches the program for longer than the lifetime of the process.
fn attach_by_netlink(
    steering: &Steering,
    nic: &Nic,
    mode: Mode,
    previous: Option<&AttachedProgram>,
) -> Result<Attempt, SteeringError> {
    // Only a program of the same mode can be replaced.
    if let Some(other) = previous.filter(|previous| previous.mode != mode) {
        program::detach(nic.ifindex, other).map_err(|error| failed(nic, "change the XDP mode", &error))?;
    }
    let old = previous.filter(|previous| previous.mode == mode);
    let result = program::attach(nic.ifindex, steering.program_fd()?, mode, old);
    Ok(Attempt::of(result, with_hint))
}

/// Attaches the program for the lifetime of the process.
fn attach_by_link(
    steering: &mut Steering,
    nic: &Nic,
    mode: Mode,
    previous: Option<&AttachedProgram>,
) -> Result<Attempt, SteeringError> {
    // A BPF link can't replace a program attached by netlink.
    if let Some(previous) = previous {
        program::detach(nic.ifindex, previous)
            .map_err(|error| failed(nic, "remove the program of an earlier gateway", &error))?;
    }
    let mode = match mode {
        Mode::Native => XdpMode::Driver,
        Mode::Generic => XdpMode::Skb,
    };
    let result = steering.program_mut()?.attach_to_if_index(nic.ifindex, mode);
    Ok(Attempt::of(result, |error| error_chain(error)))
}

/// Queries the XDP program on an interface.
///
/// # Errors
/// When the query fails, or the interface no longer exists.
pub fn program_status(steering: &Steering, ifindex: u32) -> io::Result<ProgramStatus> {
    let found = program::query(ifindex)?.map(|(id, _)| id);
    Ok(ProgramStatus::of(found, steering.program_id()))
}

/// Attaches the program to an interface again, in its previous mode, and replaces any program there.
///
/// # Errors
/// When the kernel refuses.
pub fn reattach(steering: &mut Steering, nic: &Nic, mode: Mode, on_exit: OnExit) -> Result<(), SteeringError> {
    let current = program::query(nic.ifindex).map_err(|error| failed(nic, "query its XDP program", &error))?;
    // Programs of different modes exclude each other, and so do a program attached by netlink and a BPF link.
    if let Some((_, other)) = current.filter(|(_, other)| *other != mode || on_exit == OnExit::Pass) {
        program::detach_any(nic.ifindex, other).map_err(|error| failed(nic, "remove another XDP program", &error))?;
    }
    let attempt = match on_exit {
        OnExit::Drop => Attempt::of(program::overwrite(nic.ifindex, steering.program_fd()?, mode), with_hint),
        OnExit::Pass => attach_by_link(steering, nic, mode, None)?,
    };
    match attempt {
        Attempt::Attached => Ok(()),
        Attempt::Unsupported(reason) | Attempt::Failed(reason) => {
            Err(SteeringError::Refused { interface: nic.name.clone(), what: "reattach the steering program", reason })
        }
    }
}

/// Restores the previous program on each interface, or detaches the new one if there was none.
fn roll_back(attached: Vec<(&Nic, Mode, Option<AttachedProgram>)>) {
    for (nic, mode, previous) in attached {
        let result = program::find(nic.ifindex).and_then(|current| match (current, previous) {
            (Some(current), Some(previous)) => program::restore(nic.ifindex, &previous, mode, &current),
            (Some(current), None) => program::detach(nic.ifindex, &current),
            (None, _) => Ok(()),
        });
        if let Err(error) = result {
            tracing::warn!(interface = nic.name, %error, "cannot restore the previous XDP program");
        }
    }
}

/// Detaches the steering program of a stopped gateway; returns whether there was one.
///
/// # Errors
/// When another program is attached, or the kernel refuses.
pub fn detach(nic: &Nic) -> Result<bool, SteeringError> {
    let Some(attached) = find(nic)? else { return Ok(false) };
    program::detach(nic.ifindex, &attached).map_err(|error| failed(nic, "detach the steering program", &error))?;
    Ok(true)
}

/// Whether an interface has a steering program, which [`detach`] would remove.
///
/// # Errors
/// When another program is attached, or the kernel refuses.
pub fn is_attached(nic: &Nic) -> Result<bool, SteeringError> {
    Ok(find(nic)?.is_some())
}

/// The steering program of an earlier gateway on an interface.
fn find(nic: &Nic) -> Result<Option<AttachedProgram>, SteeringError> {
    let found = program::find(nic.ifindex).map_err(|error| failed(nic, "query its XDP program", &error))?;
    match found {
        Some(foreign) if !foreign.is_ours() => {
            Err(SteeringError::Foreign { interface: nic.name.clone(), name: foreign.name, id: foreign.id })
        }
        found => Ok(found),
    }
}

fn failed(nic: &Nic, what: &'static str, error: &io::Error) -> SteeringError {
    SteeringError::Refused { interface: nic.name.clone(), what, reason: with_hint(error) }
}

fn with_hint(error: &io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; vipgate needs root, or CAP_NET_ADMIN, and CAP_SYS_ADMIN to replace the program of an earlier gateway"
        }
        Some(libc::EBUSY) => "; another process has attached an XDP program: is another gateway running?",
        Some(libc::EOPNOTSUPP) => "; the driver doesn't support XDP: set `xdp.mode: generic`",
        Some(libc::ERANGE | libc::EINVAL | libc::ENOSPC) => {
            "; the MTU may be too large for XDP, or there are too few queues"
        }
        Some(libc::ENOMEM) => "; if it stays so, the driver may lack queues for all cores: set `xdp.mode: generic`",
        _ => "",
    };
    format!("{error}{hint}")
}

#[cfg(test)]
mod tests {
    use aya::programs::ProgramError;
    use aya::sys::SyscallError;

    use super::*;

    /// Attaches where native mode fails with this error; returns the outcome and the modes that were tried.
    fn attach_where_native_fails(error: i32) -> (Result<Mode, String>, Vec<Mode>) {
        let nic = Nic { name: "gw-in".to_owned(), ifindex: 2, queues: 1, native_xdp: true, zero_copy: false };
        let mut tried = Vec::new();
        let outcome = attach_in_first_supported(&nic, &[Mode::Native, Mode::Generic], |mode| {
            tried.push(mode);
            let result = match mode {
                Mode::Native => Err(io::Error::from_raw_os_error(error)),
                Mode::Generic => Ok(()),
            };
            Ok(Attempt::of(result, with_hint))
        });
        (outcome.map_err(|error| error.to_string()), tried)
    }

    #[test]
    fn generic_mode_is_used_only_where_native_mode_is_not_supported() {
        for error in [libc::EOPNOTSUPP, libc::EINVAL, libc::ERANGE, libc::E2BIG, libc::ENOSPC] {
            assert_eq!(attach_where_native_fails(error), (Ok(Mode::Generic), vec![Mode::Native, Mode::Generic]));
        }
        for error in [libc::ENOMEM, libc::ENOBUFS, libc::EINTR, libc::EMFILE, libc::EBUSY, libc::EPERM] {
            let (outcome, tried) = attach_where_native_fails(error);
            let message = outcome.unwrap_err();
            assert!(message.contains("cannot attach") && message.ends_with("(native mode)"), "{message}");
            assert_eq!(tried, [Mode::Native], "{message}");
        }
    }

    #[test]
    fn the_errors_of_the_last_mode_and_of_other_calls_are_returned() {
        let nic = Nic { name: "gw-in".to_owned(), ifindex: 2, queues: 1, native_xdp: true, zero_copy: false };
        let unsupported = |_| Ok(Attempt::Unsupported("no".to_owned()));
        let error = attach_in_first_supported(&nic, &[Mode::Native, Mode::Generic], unsupported).unwrap_err();
        assert_eq!(error.to_string(), "interface gw-in: cannot attach the steering program: no (generic mode)");
        let other = |_| Err(failed(&nic, "change the XDP mode", &io::Error::from_raw_os_error(libc::ENOBUFS)));
        let error = attach_in_first_supported(&nic, &[Mode::Native, Mode::Generic], other).unwrap_err();
        assert!(error.to_string().contains("cannot change the XDP mode"), "{error}");
    }

    #[test]
    fn the_error_of_a_bpf_link_is_that_of_its_call() {
        for (number, is_unsupported) in [(libc::EOPNOTSUPP, true), (libc::ENOMEM, false)] {
            let io_error = io::Error::from_raw_os_error(number);
            let error = ProgramError::SyscallError(SyscallError { call: "bpf_link_create", io_error });
            let attempt = Attempt::of(Err::<(), _>(error), |error| error_chain(error));
            assert_eq!(matches!(attempt, Attempt::Unsupported(_)), is_unsupported, "{attempt:?}");
        }
    }
}
