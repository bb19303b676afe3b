package raas

import (
	"context"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"example.com/astraflow/member"
	"example.com/astraflow/weights"
)

// followVersions takes every version that is newer than what is held.
func (n *Node) followVersions(ctx context.Context) error {
	open := func(ctx context.Context) (weightsv1.VersionService_WatchVersionsClient, error) {
		return n.ledger.WatchVersions(ctx, &weightsv1.WatchVersionsRequest{PolicyId: n.settings.Policy})
	}
	return member.Read(ctx, n.member, false, open, func(event *weightsv1.WatchVersionsResponse) (bool, error) {
		if event.Version.Version <= n.Version() {
			return true, nil
		}
		return true, n.follow(ctx, event.Version)
	})
}

// follow asks each source for patches from what is held, then for everything anew.
func (n *Node) follow(ctx context.Context, info *weightsv1.VersionInfo) error {
	var failed error
	for _, source := range info.Sources {
		if source.Endpoint == "" {
			continue
		}
		for _, anew := range []bool{false, true} {
			announced, err := n.announced(ctx)
			if err != nil {
				return err
			}
			from := weights.Source{Endpoint: source.Endpoint, Token: n.member.TransferToken()}
			if failed = n.replica.Pull(ctx, info, from, announced, anew); failed == nil {
				return n.report(ctx, info.Version, weightsv1.VersionState_VERSION_STATE_LIVE, nil)
			}
		}
	}
	if failed == nil {
		return nil
	}
	reason := commonv1.Reason_REASON_DIGEST_MISMATCH
	if number, ok := commonv1.Reason_value["REASON_"+member.Reason(failed)]; ok {
		reason = commonv1.Reason(number)
	}
	failure := &commonv1.Failure{Reason: reason, Message: failed.Error(), Retryable: true}
	return n.report(ctx, info.Version, weightsv1.VersionState_VERSION_STATE_FAILED, failure)
}

// announced lists all patches that the run knows: a version gains some after it was published.
func (n *Node) announced(ctx context.Context) (patches []*weightsv1.PatchInfo, err error) {
	err = n.member.Call(ctx, func(ctx context.Context) error {
		answer, err := n.ledger.ListVersions(ctx, &weightsv1.ListVersionsRequest{PolicyId: n.settings.Policy})
		for _, version := range answer.GetVersions() {
			patches = append(patches, version.Patches...)
		}
		return err
	})
	return patches, err
}

func (n *Node) report(
	ctx context.Context, version int64, state weightsv1.VersionState, failure *commonv1.Failure,
) error {
	return n.member.Call(ctx, func(ctx context.Context) error {
		_, err := n.ledger.ReportVersion(ctx, &weightsv1.ReportVersionRequest{
			PolicyId: n.settings.Policy,
			Version:  version,
			State:    state,
			Failure:  failure,
		})
		return err
	})
}
