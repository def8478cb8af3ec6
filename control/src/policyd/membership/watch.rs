//! Views for node agents: the current one, then each later one, without leases. Nothing is queued: a client that reads
//! slowly gets the latest view only.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use futures::stream::{Stream, unfold};
use tokio::sync::watch;
use tonic::Status;

use crate::membership::MembershipView;
use crate::xds::proto::MembershipUpdate;

/// Updates with views until the membership authority ends.
pub(super) fn updates(
    mut view: watch::Receiver<Arc<MembershipView>>,
) -> impl Stream<Item = Result<MembershipUpdate, Status>> + Send {
    // The current view is new to this client.
    view.mark_changed();
    unfold(Some((view, None)), |state| async move {
        let (mut view, mut sent) = state?;
        while view.changed().await.is_ok() {
            let current = view.borrow_and_update().clone();
            // Number 0 is no view yet.
            if current.number > 0 && sent.as_ref() != Some(&current) {
                let update = MembershipUpdate { view: Some((&*current).into()), ..MembershipUpdate::default() };
                sent = Some(current);
                return Some((Ok(update), Some((view, sent))));
            }
        }
        Some((Err(super::service::stopping()), None))
    })
}
