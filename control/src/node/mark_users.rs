//! Looks for others that use the agent's bits of marks: their rules and the agent's would act on each other's packets.

use std::time::Duration;

use tokio::sync::watch;
use vipgate_node::kernel::Kernel;
use vipgate_node::mark_users::MarkUsers;

/// How often. The plugin portmap adds its rules with the first pod that has a port on the node.
const INTERVAL: Duration = Duration::from_mins(10);

/// Publishes and logs what it finds, again and again.
pub(super) async fn watch(kernel: &mut Kernel, found: &watch::Sender<MarkUsers>) {
    loop {
        match kernel.mark_users().await {
            Ok(users) => publish(users, found),
            Err(error) => {
                let error = error.to_string();
                tracing::warn!(event = "marks_not_checked", error, "whether others use the same marks isn't known");
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn publish(users: MarkUsers, found: &watch::Sender<MarkUsers>) {
    if *found.borrow() == users {
        return;
    }
    for (place, bits) in users.iter() {
        let bits = format!("{bits:#x}");
        tracing::warn!(
            event = "mark_conflict",
            place,
            bits,
            "somebody else uses bits of `mark_mask`: packets may be dropped, or leave with another address"
        );
    }
    found.send_replace(users);
}
