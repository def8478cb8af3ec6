//! Settings of the IP stack (sysctl net.*) for devices, as files.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use crate::error::NodeError;

/// The directory of settings, usually `/proc/sys/net`. In a container that is often read-only; those of the same network
/// namespace may be elsewhere, too.
#[derive(Debug)]
pub(super) struct Sysctls(pub(super) PathBuf);

impl Default for Sysctls {
    fn default() -> Self {
        Self("/proc/sys/net".into())
    }
}

impl Sysctls {
    /// Whether a device has IPv6: the kernel may lack it, or an administrator have disabled it.
    pub(super) fn has_ipv6(&self, device: &str) -> bool {
        let path = self.0.join("ipv6/conf").join(device).join("disable_ipv6");
        fs::read_to_string(path).is_ok_and(|disabled| disabled.trim() == "0")
    }

    /// Writes a setting of a device unless it has this value; whether it was another one. Where there is no IPv6, it has
    /// no settings.
    pub(super) fn write(&self, device: &str, family: &str, setting: &str, value: &str) -> Result<bool, NodeError> {
        let path = self.0.join(family).join("conf").join(device).join(setting);
        match fs::read_to_string(&path) {
            Ok(current) if current.trim() == value => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound && family == "ipv6" => Ok(false),
            _ => fs::write(&path, value).map(|()| true).map_err(NodeError::of(path.display().to_string())),
        }
    }
}
