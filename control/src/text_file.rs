//! Text files of bounded size; reading regular files only avoids blocking on pipes and devices.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Maximum size of a file, bytes: 256 MiB, some hundred thousand objects printed by `kubectl get -o yaml`.
pub const MAX_FILE_BYTES: u64 = 256 << 20;

/// Reads a regular file.
///
/// # Errors
/// If it can't be read, is too long, or is not a regular file.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    require_regular(path.metadata()?.file_type())?;
    // Non-blocking: it may have been replaced by a pipe, whose open blocks until there is a writer.
    let flags = (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)?;
    require_regular(file.metadata()?.file_type())?;
    read_bounded(&file)
}

/// Reads a regular file as text.
///
/// # Errors
/// As [`read_regular`]; and if it isn't UTF-8.
pub fn regular_text(path: &Path) -> io::Result<String> {
    as_text(read_regular(path)?)
}

/// Reads any file as text, including pipes: for interactive commands.
///
/// # Errors
/// If it can't be read, is too long, or isn't UTF-8.
pub fn named_text(path: &Path) -> io::Result<String> {
    as_text(read_bounded(&File::open(path)?)?)
}

/// Rejects file types other than regular files.
///
/// # Errors
/// If it is not a regular file; the error has the type.
pub fn require_regular(kind: FileType) -> io::Result<()> {
    let name = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "a directory",
    };
    Err(io::Error::other(format!("it is {name}, not a regular file")))
}

fn read_bounded(file: &File) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::other(format!("it is longer than {} MiB", MAX_FILE_BYTES >> 20));
    let length = file.metadata()?.len();
    if length > MAX_FILE_BYTES {
        return Err(too_long());
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES { Err(too_long()) } else { Ok(bytes) }
}

fn as_text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_regular_files_up_to_the_maximum_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file.yaml"), "a: 1").unwrap();
        assert_eq!(regular_text(&at("file.yaml")).unwrap(), "a: 1");
        std::os::unix::fs::symlink(at("file.yaml"), at("link.yaml")).unwrap();
        assert_eq!(regular_text(&at("link.yaml")).unwrap(), "a: 1");
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        let long = File::create(at("long")).unwrap();
        long.set_len(MAX_FILE_BYTES + 1).unwrap();
        for (path, reason) in [
            (at("pipe"), "it is a pipe, not a regular file"),
            (at("socket"), "it is a socket, not a regular file"),
            ("/dev/zero".into(), "it is a device, not a regular file"),
            (dir.path().to_owned(), "it is a directory, not a regular file"),
            (at("long"), "it is longer than 256 MiB"),
        ] {
            assert_eq!(read_regular(&path).unwrap_err().to_string(), reason, "{}", path.display());
        }
        assert_eq!(named_text(&at("long")).unwrap_err().to_string(), "it is longer than 256 MiB");
        std::fs::write(at("file.yaml"), [0xff]).unwrap();
        assert_eq!(regular_text(&at("file.yaml")).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_pipe_is_read_as_named_text() {
        let (reader, mut writer) = io::pipe().unwrap();
        io::Write::write_all(&mut writer, b"a: 1").unwrap();
        drop(writer);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        assert_eq!(named_text(Path::new(&path)).unwrap(), "a: 1");
    }
}
