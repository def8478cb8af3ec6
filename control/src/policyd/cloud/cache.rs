//! A file with the last observations, as JSON, for a server that starts while a provider isn't reachable: without the private addresses
//! of VIPs, its first policy would take them from gateways that have them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use vipgate_common::{Tasks, spawn_blocking};
use vipgate_policy::manifest::CloudPool;

use super::Inventory;
use crate::replaced_file::Format;

const FORMAT: Format = Format { name: "cloud cache", version: 1, mode: 0o644 };
/// Least time between two writes: observations change in steps while addresses are attached.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);

/// What is in the file; nothing if there is none, or if it can't be read or is refused.
pub(super) fn read(path: &Path) -> Inventory {
    let content = FORMAT.read(path).and_then(|content| content.map_err(io::Error::other));
    let parsed = content.and_then(|content| serde_json::from_slice(&content).map_err(io::Error::other));
    let pools: BTreeMap<String, CloudPool> = parsed.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(event = "cloud_cache_failed", path = %path.display(), "can't be read: {error}");
        }
        BTreeMap::new()
    });
    pools.into_iter().map(|(name, pool)| (name, Arc::new(pool))).collect()
}

/// Writes each new inventory until the stop signal of `tasks`.
pub(super) async fn run(path: PathBuf, mut inventory: watch::Receiver<Arc<Inventory>>, tasks: Tasks) {
    let mut is_failed = false;
    loop {
        tokio::select! {
            changed = inventory.changed() => if changed.is_err() { return },
            () = tasks.stopped() => return,
        }
        let current = inventory.borrow_and_update().clone();
        // While a pool isn't observed, what is known of it is in the file.
        if current.is_empty() {
            continue;
        }
        let target = path.clone();
        match spawn_blocking(move || write(&target, &current)).await {
            Ok(()) => is_failed = false,
            Err(error) if !is_failed => {
                is_failed = true;
                tracing::warn!(event = "cloud_cache_failed", path = %path.display(), "can't be written: {error}");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = sleep(WRITE_INTERVAL) => {}
            () = tasks.stopped() => return,
        }
    }
}

/// Writes atomically, with what the file has of pools that `inventory` lacks.
fn write(path: &Path, inventory: &Inventory) -> io::Result<()> {
    let before = read(path);
    let all: BTreeMap<&String, &CloudPool> =
        before.iter().chain(inventory).map(|(name, pool)| (name, &**pool)).collect();
    FORMAT.write(path, &serde_json::to_vec(&all)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::IpAddr;

    use vipgate_policy::manifest::{CloudAddress, CloudNic};

    use super::*;

    fn pool(last: u8) -> Arc<CloudPool> {
        let address: IpAddr = [203, 0, 113, last].into();
        let private = [("gw-a".to_owned(), IpAddr::from([10, 0, 1, last]))].into();
        let cloud = CloudAddress { owner: Some("Service a/b".to_owned()), zone: Some("z1".to_owned()), private };
        let nic = CloudNic { capacity: 9, ..CloudNic::default() };
        Arc::new(CloudPool { addresses: [(address, cloud)].into(), nics: [("gw-a".to_owned(), nic)].into() })
    }

    fn inventory(pools: &[(&str, u8)]) -> Inventory {
        pools.iter().map(|(name, last)| ((*name).to_owned(), pool(*last))).collect()
    }

    #[test]
    fn what_is_written_is_read_and_pools_that_arent_observed_stay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cloud.cache");
        assert_eq!(read(&path), Inventory::new());
        write(&path, &inventory(&[("a", 1), ("b", 2)])).unwrap();
        write(&path, &inventory(&[("a", 3)])).unwrap();
        assert_eq!(read(&path), inventory(&[("a", 3), ("b", 2)]));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_damaged_file_is_as_none_and_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cloud.cache");
        write(&path, &inventory(&[("a", 1)])).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        // Still JSON, but of another address.
        let at = bytes.windows(5).position(|text| text == b"113.1").unwrap();
        bytes[at + 4] = b'2';
        for damaged in [&b"{\"a\": {\"addresses\": "[..], &FORMAT.file(b"{\"a\": {\"addresses\": "), b"{}", &bytes] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), Inventory::new());
            write(&path, &inventory(&[("a", 1)])).unwrap();
            assert_eq!(read(&path), inventory(&[("a", 1)]));
        }
    }

    #[tokio::test]
    async fn observations_are_written_when_they_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cloud.cache");
        let (observed, inventory_of) = watch::channel(Arc::new(Inventory::new()));
        let tasks = Tasks::default();
        tasks.spawn("cache", run(path.clone(), inventory_of, tasks.clone()));
        for last in 1..4 {
            let wanted = inventory(&[("a", last)]);
            observed.send_replace(Arc::new(wanted.clone()));
            let written = async {
                while read(&path) != wanted {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(10 * WRITE_INTERVAL, written).await.unwrap();
        }
        assert!(tasks.stop(10 * WRITE_INTERVAL).await);
    }
}
