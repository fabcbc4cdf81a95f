#!/bin/sh
# A busy repository: commits, branches that come and go, packs that are rewritten. Prints each commit's number.
set -eu
cd "$1"
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@example.org GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@example.org
export GIT_CONFIG_NOSYSTEM=1 HOME="$1"
[ -d .git ] || git init -q -b main .
git config gc.auto 0
n=0
while :; do
	n=$((n + 1))
	mkdir -p "d$((n % 7))"
	echo "line $n" >>"d$((n % 7))/file$((n % 23)).txt"
	git add -A
	git commit -q -m "commit $n"
	echo "$n $(date +%s%3N)"
	[ $((n % 5)) -ne 0 ] || git branch -f "topic/$((n % 3))/$n"
	[ $((n % 11)) -ne 0 ] || git for-each-ref --format='%(refname:short)' refs/heads/topic | head -2 | xargs -r git branch -q -D
	[ $((n % 17)) -ne 0 ] || git repack -q -a -d
	[ $((n % 29)) -ne 0 ] || git gc -q --prune=now
	sleep 0.05
done
