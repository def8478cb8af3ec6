//! The table in the kernel, through the program `nft`, as kube-proxy does it: one script is one transaction.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::error::KernelError;
use crate::nft::script::script;
use crate::nft::table::{TABLE, Table};

/// Maximum length of an error message that is kept, bytes.
const MAX_MESSAGE: usize = 400;

/// A named counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes, from the IP header on.
    pub bytes: u64,
}

/// The table in the kernel.
#[derive(Debug)]
pub(super) struct Nft {
    program: PathBuf,
    /// What it was programmed with; `None`: nothing yet, or it is unknown.
    programmed: Option<Table>,
    /// How the kernel lists that, without counts.
    listing: Option<Value>,
}

impl Nft {
    pub(super) fn new(program: PathBuf) -> Self {
        Self { program, programmed: None, listing: None }
    }

    /// Programs a table; whether anything was changed.
    pub(super) async fn apply(&mut self, table: &Table) -> Result<bool, KernelError> {
        let change = script(self.programmed.as_ref(), table);
        if change.is_empty() {
            return Ok(false);
        }
        // Somebody may have changed what the script refers to.
        let result = self.run(&["-f", "-"], &change).await;
        if result.is_err() && self.programmed.is_some() {
            self.programmed = None;
            self.run(&["-f", "-"], &script(None, table)).await?;
        } else {
            result?;
        }
        self.programmed = Some(table.clone());
        self.listing = Some(self.list().await?);
        Ok(true)
    }

    /// Compares the kernel's table with what was programmed, and programs it again if it differs; whether it did.
    pub(super) async fn check(&mut self, table: &Table) -> Result<bool, KernelError> {
        if self.programmed.as_ref() == Some(table) && self.listing.is_some() && self.list().await.ok() == self.listing {
            return Ok(false);
        }
        self.programmed = None;
        self.apply(table).await
    }

    pub(super) async fn counters(&self) -> Result<BTreeMap<String, Counter>, KernelError> {
        let text = self.run(&["-j", "list", "counters", "table", "inet", "vipgate"], "").await?;
        let listing: Value = serde_json::from_str(&text).unwrap_or_default();
        let objects = listing["nftables"].as_array().into_iter().flatten();
        let counter = |object: &Value| {
            let counter = object.get("counter")?;
            let of = |field: &str| counter[field].as_u64().unwrap_or_default();
            Some((counter["name"].as_str()?.to_owned(), Counter { packets: of("packets"), bytes: of("bytes") }))
        };
        Ok(objects.filter_map(counter).collect())
    }

    pub(super) async fn remove(&mut self) -> Result<(), KernelError> {
        self.programmed = None;
        let script = format!("add table {TABLE}\ndelete table {TABLE}\n");
        self.run(&["-f", "-"], &script).await.map(drop)
    }

    /// The table as JSON, without what changes by itself.
    async fn list(&self) -> Result<Value, KernelError> {
        let text = self.run(&["-j", "list", "table", "inet", "vipgate"], "").await?;
        let mut listing: Value = serde_json::from_str(&text).unwrap_or_default();
        strip(&mut listing);
        Ok(listing)
    }

    async fn run(&self, arguments: &[&str], input: &str) -> Result<String, KernelError> {
        let failed = |source| KernelError::NoNft { program: self.program.display().to_string(), source };
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let stdin = child.stdin.take();
        let write = async {
            if let Some(mut stdin) = stdin {
                // It may have ended with an error before it has read all.
                let _ = stdin.write_all(input.as_bytes()).await;
            }
        };
        let ((), output) = tokio::join!(write, child.wait_with_output());
        let output = output.map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(MAX_MESSAGE).collect();
        Err(KernelError::Nft { command: arguments.join(" "), message })
    }
}

/// Removes handles, versions and counts.
fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for field in ["handle", "metainfo", "packets", "bytes"] {
                fields.remove(field);
            }
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}
