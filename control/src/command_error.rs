//! Errors of commands: the message for the user, the error behind it, and the exit code.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind};
use std::process::ExitCode;

use rustix::io::Errno;

/// Error of a command. Its text is one line: the context, then the text of its source, which includes the sources below
/// it where those say more.
#[derive(Debug)]
pub struct CommandError {
    kind: Kind,
    /// What failed, with ": " at its end; empty if the source says it.
    context: String,
    source: Box<dyn Error + Send + Sync>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usage,
    Runtime,
}

impl CommandError {
    /// Failure at run time: exit code 1.
    pub fn runtime(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: Kind::Runtime, context: String::new(), source: error.into() }
    }

    /// Wrong usage, configuration or manifest: exit code 2.
    pub fn usage(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind: Kind::Usage, ..Self::runtime(error) }
    }

    /// An input that can't be used, as the configuration names it: exit code 2, with which systemd doesn't start the
    /// process again; but 1 if that is for an error of the kernel that may pass.
    pub fn input(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let error = Self::usage(error);
        let kind = if io_cause(&*error.source).is_some_and(may_pass) { Kind::Runtime } else { Kind::Usage };
        Self { kind, ..error }
    }

    /// Says before the text of the error what failed: a setting, a file, an action.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.context.insert_str(0, &format!("{context}: "));
        self
    }

    pub fn exit_code(&self) -> ExitCode {
        match self.kind {
            Kind::Usage => ExitCode::from(2),
            Kind::Runtime => ExitCode::from(1),
        }
    }
}

/// The I/O error that an error is, or that is behind it.
fn io_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    error.downcast_ref().or_else(|| io_cause(error.source()?))
}

/// Whether an error of a file may be gone without a change of the configuration. Those that aren't known may.
pub(crate) fn may_pass(error: &io::Error) -> bool {
    let is_of_name_or_content = matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
            | ErrorKind::InvalidFilename
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::InvalidInput
            | ErrorKind::InvalidData
            // Not of the kernel: a kind of file, or its size.
            | ErrorKind::Other
    );
    !is_of_name_or_content && Errno::from_io_error(error) != Some(Errno::LOOP)
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.context, self.source)
    }
}

impl Error for CommandError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error with another one as its source.
    #[derive(Debug, thiserror::Error)]
    #[error("state: {source}")]
    struct Unreadable {
        source: io::Error,
    }

    #[test]
    fn what_the_kernel_refuses_for_the_moment_is_no_wrong_configuration() {
        let code = |source: io::Error| CommandError::input(Unreadable { source }).context("tls").exit_code();
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::IO, Errno::INTR, Errno::NOLCK, Errno::NOSPC] {
            assert_eq!(code(error.into()), ExitCode::from(1), "{error}");
            assert_eq!(CommandError::input(io::Error::from(error)).exit_code(), ExitCode::from(1), "{error}");
        }
        for error in [Errno::NOENT, Errno::ACCESS, Errno::ISDIR, Errno::NOTDIR, Errno::LOOP, Errno::ROFS] {
            assert_eq!(code(error.into()), ExitCode::from(2), "{error}");
        }
        assert_eq!(code(io::Error::other("it is a pipe, not a regular file")), ExitCode::from(2));
        assert_eq!(code(ErrorKind::InvalidData.into()), ExitCode::from(2));
        assert_eq!(CommandError::input("has 15 bytes").exit_code(), ExitCode::from(2));
    }

    #[test]
    fn an_error_keeps_its_source_behind_its_text() {
        let denied = io::Error::from(ErrorKind::PermissionDenied);
        let error = CommandError::usage(denied).context("cannot create x").context("sessions.state");
        assert_eq!(error.to_string(), "sessions.state: cannot create x: permission denied");
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.map(io::Error::kind), Some(ErrorKind::PermissionDenied));
        assert_eq!(error.exit_code(), ExitCode::from(2));
        assert_eq!(CommandError::runtime("interrupted").to_string(), "interrupted");
    }
}
