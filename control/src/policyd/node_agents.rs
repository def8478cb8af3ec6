//! The agents of nodes: the secret of their tunnels' MAC addresses, from its file.

use std::path::Path;

use vipgate_policy::compiler::{NodeAgents, TunnelSecret};

use crate::command_error::CommandError;
use crate::config::NodeAgentsConfig;
use crate::text_file::read_regular;

/// Minimum length of the secret, bytes: 128 bits, if they are random.
const MIN_SECRET_BYTES: usize = 16;

/// The options of the compiler.
///
/// # Errors
/// The secret can't be read, or is too short.
pub(super) fn options(config: &NodeAgentsConfig) -> Result<NodeAgents, CommandError> {
    let secret = config.tunnel_secret.as_deref().map(read_secret).transpose();
    let secret = secret.map_err(|error| error.context("node_agents.tunnel_secret"))?;
    Ok(config.options(secret))
}

fn read_secret(path: &Path) -> Result<TunnelSecret, CommandError> {
    let bytes = read_regular(path)
        .map_err(|error| CommandError::input(error).context("can't be read").context(path.display()))?;
    // An editor's newline at the end must not tell servers apart.
    let secret = bytes.trim_ascii_end();
    if secret.len() < MIN_SECRET_BYTES {
        let text = format!("has {} bytes, and needs at least {MIN_SECRET_BYTES} random ones", secret.len());
        return Err(CommandError::input(text).context(path.display()));
    }
    Ok(TunnelSecret::new(secret))
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::fs;

    use super::*;

    #[test]
    fn a_secret_needs_sixteen_bytes_and_its_last_newline_does_not_count() {
        let directory = tempfile::tempdir().unwrap();
        let read = |content: &str| {
            let path = directory.path().join("secret");
            fs::write(&path, content).unwrap();
            read_secret(&path)
        };
        assert_eq!(read("0123456789abcdef").unwrap(), read("0123456789abcdef\n").unwrap());
        assert_ne!(read("0123456789abcdef").unwrap(), read("0123456789abcdeg").unwrap());
        let short = read("0123456789abcde\n").unwrap_err().to_string();
        assert!(short.ends_with("has 15 bytes, and needs at least 16 random ones"), "{short}");
        let missing = read_secret(&directory.path().join("none")).unwrap_err();
        // With its cause, which decides on the exit code.
        assert!(missing.to_string().contains("can't be read") && missing.source().is_some(), "{missing}");
    }
}
