//! A cloud on the testbed: its API on the management host, and its fabric on the outside router, which takes packets of a public
//! address to the private address that the API's state says, and back.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vipgate_cloud_testkit::FakeServer;
use vipgate_cloud_testkit::aws::FakeAws;
use vipgate_lab::Host;

/// How often the fabric looks at the state.
const INTERVAL: Duration = Duration::from_millis(20);

/// A fake of AWS with a fabric. Ends when it is dropped.
pub struct FakeCloud {
    server: Arc<FakeServer<FakeAws>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for FakeCloud {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeCloud { .. }")
    }
}

impl FakeCloud {
    /// Starts the API at `address` of `api`, and the fabric on `router`.
    pub fn start(cloud: FakeAws, api: &Host, address: SocketAddr, router: &Host, folder: PathBuf) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let (started, starts) = std::sync::mpsc::channel();
        let until = stop.clone();
        let served = api.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let server = Arc::new(FakeServer::start_at(address, cloud).await?);
                // The test may have ended.
                let _ = started.send(server);
                while !until.load(Ordering::Relaxed) {
                    tokio::time::sleep(INTERVAL).await;
                }
                Ok(())
            })
        });
        let server = starts.recv().expect("the fake starts");
        let serving = thread::spawn(move || served.join().unwrap().unwrap());
        let (of_fabric, until, router) = (server.clone(), stop.clone(), router.clone());
        let fabric = thread::spawn(move || {
            let mut last = None;
            while !until.load(Ordering::Relaxed) {
                let routes = of_fabric.with(|cloud| cloud.routes());
                if last.as_ref() != Some(&routes) {
                    apply(&router, &folder, &routes);
                    last = Some(routes);
                }
                thread::sleep(INTERVAL);
            }
        });
        Self { server, stop, threads: vec![serving, fabric] }
    }

    /// Looks at or changes the cloud's state.
    pub fn with<T>(&self, work: impl FnOnce(&mut FakeAws) -> T) -> T {
        self.server.with(work)
    }

    /// The actions that were requested since the last call.
    pub fn take_actions(&self) -> Vec<String> {
        let action = |request: vipgate_cloud_testkit::RecordedRequest| {
            request.form().into_iter().find(|(name, _)| name == "Action").map(|(_, value)| value)
        };
        self.server.take_log().into_iter().filter_map(action).collect()
    }
}

impl Drop for FakeCloud {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of it has failed the test already.
            let _ = thread.join();
        }
    }
}

/// Translates without state, so that a connection follows its address to another gateway.
fn apply(router: &Host, folder: &std::path::Path, routes: &BTreeMap<IpAddr, (String, IpAddr)>) {
    let v4 = routes.iter().filter(|(public, _)| public.is_ipv4());
    let pairs: Vec<(String, String)> =
        v4.map(|(public, (_, private))| (public.to_string(), private.to_string())).collect();
    let elements = |of: &dyn Fn(&(String, String)) -> String| {
        if pairs.is_empty() {
            return String::new();
        }
        format!("elements = {{ {} }}", pairs.iter().map(of).collect::<Vec<_>>().join(", "))
    };
    let rules = format!(
        "table ip fabric\ndelete table ip fabric\ntable ip fabric {{\n\
         map private {{ type ipv4_addr : ipv4_addr; {} }}\n\
         map public {{ type ipv4_addr : ipv4_addr; {} }}\n\
         chain fabric {{\n type filter hook prerouting priority -400;\n\
         ip daddr set ip daddr map @private\n ip saddr set ip saddr map @public\n }}\n}}\n",
        elements(&|(public, private)| format!("{public} : {private}")),
        elements(&|(public, private)| format!("{private} : {public}")),
    );
    let file = folder.join("fabric.nft");
    fs::write(&file, rules).unwrap();
    router.output(&["nft", "-f", &file.display().to_string()]).unwrap();
}
