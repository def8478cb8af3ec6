//! The table in the kernel, through the program `nft`, as kube-proxy does it: a script is a transaction.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::NodeError;
use crate::nft::listing;
use crate::nft::script::{Before, Change, change, replacement};
use crate::nft::table::{TABLE, Table};

/// Maximum length of an error message that is kept, bytes.
const MAX_MESSAGE: usize = 400;

/// A named counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
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
    pub(super) async fn apply(&mut self, table: &Table) -> Result<bool, NodeError> {
        if let Some(programmed) = &self.programmed {
            let change = change(Before::Exactly(programmed), table);
            if change.switch.is_empty() && change.prepare.is_empty() {
                return Ok(false);
            }
            // It fails if somebody has changed what the scripts refer to: then what is there decides.
            if self.run_change(&change).await.is_ok() {
                self.note(table).await?;
                return Ok(true);
            }
        }
        let listing = self.list().await.ok();
        self.restore(table, listing).await?;
        Ok(true)
    }

    /// Compares the kernel's table with what was programmed, and programs it again if it differs; whether it did.
    pub(super) async fn check(&mut self, table: &Table) -> Result<bool, NodeError> {
        let listing = self.list().await.ok();
        if self.programmed.as_ref() == Some(table) && self.listing.is_some() && listing == self.listing {
            return Ok(false);
        }
        self.restore(table, listing).await?;
        Ok(true)
    }

    /// Programs a table in place of the one that the kernel has, if it has one, whatever that contains.
    async fn restore(&mut self, table: &Table, listing: Option<Value>) -> Result<(), NodeError> {
        self.programmed = None;
        if let Some(found) = listing.and_then(|listing| listing::objects(&listing, table)) {
            match self.run_change(&change(Before::Objects(&found), table)).await {
                Ok(()) => return self.note(table).await,
                Err(error) => tracing::warn!(
                    event = "table_replaced",
                    %error,
                    "the nftables table can't be changed in place: it is replaced"
                ),
            }
        }
        self.run(&["-f", "-"], &replacement(table)).await?;
        self.note(table).await
    }

    async fn run_change(&self, Change { prepare, switch }: &Change) -> Result<(), NodeError> {
        for script in [prepare, switch].into_iter().filter(|script| !script.is_empty()) {
            self.run(&["-f", "-"], script).await?;
        }
        Ok(())
    }

    /// Notes what the kernel has now.
    async fn note(&mut self, table: &Table) -> Result<(), NodeError> {
        self.programmed = Some(table.clone());
        self.listing = None;
        self.listing = Some(self.list().await?);
        Ok(())
    }

    pub(super) async fn counters(&self) -> Result<BTreeMap<String, Counter>, NodeError> {
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

    /// All tables of the namespace, without counts and elements of sets.
    pub(super) async fn ruleset(&self) -> Result<String, NodeError> {
        self.run(&["-n", "-s", "-t", "list", "ruleset"], "").await
    }

    pub(super) async fn remove(&mut self) -> Result<(), NodeError> {
        self.programmed = None;
        let script = format!("add table {TABLE}\ndelete table {TABLE}\n");
        self.run(&["-f", "-"], &script).await.map(drop)
    }

    /// The table as JSON, without what changes by itself.
    async fn list(&self) -> Result<Value, NodeError> {
        let text = self.run(&["-j", "list", "table", "inet", "vipgate"], "").await?;
        let mut listing: Value = serde_json::from_str(&text).unwrap_or_default();
        strip(&mut listing);
        Ok(listing)
    }

    async fn run(&self, arguments: &[&str], input: &str) -> Result<String, NodeError> {
        let failed = |error: io::Error| {
            let hint = io::Error::new(error.kind(), format!("{error}: install nftables, or set `nft`"));
            NodeError::of(self.program.display().to_string())(hint)
        };
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
        let message: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(MAX_MESSAGE).collect();
        Err(NodeError::of(format!("nft {}", arguments.join(" ")))(io::Error::other(message)))
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
