//! What a node agent is sent as the view changes.

use std::pin::pin;

use futures::{FutureExt as _, StreamExt as _};
use tonic::Code;

use super::*;

fn view(number: u64) -> Arc<MembershipView> {
    Arc::new(MembershipView { number, ..MembershipView::default() })
}

#[tokio::test]
async fn a_client_gets_the_current_view_then_each_later_one_without_leases() {
    let (sender, receiver) = watch::channel(view(7));
    let mut updates = pin!(updates(receiver));
    for number in 7..10 {
        let update = updates.next().now_or_never().expect("it is there").unwrap().unwrap();
        assert_eq!(update, MembershipUpdate { view: Some((&*view(number)).into()), ..MembershipUpdate::default() });
        assert!(updates.next().now_or_never().is_none(), "nothing else");
        sender.send_replace(view(number));
        assert!(updates.next().now_or_never().is_none(), "the same view again");
        sender.send_replace(view(number + 1));
    }
}

#[tokio::test]
async fn no_view_is_not_sent() {
    let (sender, receiver) = watch::channel(view(0));
    let mut updates = pin!(updates(receiver));
    assert!(updates.next().now_or_never().is_none());
    sender.send_replace(view(1));
    let update = updates.next().now_or_never().expect("it is there").unwrap().unwrap();
    assert_eq!(update.view.map(|view| view.number), Some(1));
}

#[tokio::test]
async fn a_slow_client_gets_the_latest_view_only() {
    let (sender, receiver) = watch::channel(view(1));
    let mut updates = pin!(updates(receiver));
    for number in 2..100 {
        sender.send_replace(view(number));
    }
    let update = updates.next().now_or_never().expect("it is there").unwrap().unwrap();
    assert_eq!(update.view.map(|view| view.number), Some(99));
    assert!(updates.next().now_or_never().is_none());
}

#[tokio::test]
async fn the_stream_ends_with_unavailable_when_the_authority_does() {
    let (sender, receiver) = watch::channel(view(1));
    let mut updates = pin!(updates(receiver));
    assert!(updates.next().await.unwrap().is_ok());
    drop(sender);
    assert_eq!(updates.next().await.unwrap().unwrap_err().code(), Code::Unavailable);
    assert!(updates.next().await.is_none());
}
