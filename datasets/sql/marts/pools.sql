-- pools: training problems left after every rule, dealt to disjoint pools by a seeded hash.
-- Each family is dealt by itself, so that every pool holds its share of every family. What is left
-- when shares add up to less than 1, and problems without a trace in a pool that wants traces, go
-- to no pool (null).
-- Grain: one row per problem_id.
--   pool        varchar  cold_start, rl, preference, distillation, or null
--   problem_id  varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   question    varchar  as it was read
--   answer      varchar  gold answer
--   family      varchar  kind of problem
--   source      varchar  where it stands in the recipe, and what it is
--   row_number  bigint   1 for the first row of the source
--   row_id      varchar  the source's own name for the row; null without one
--   answer_type varchar  how answers are graded (stages/rewards/tasks.py)
--   grading     varchar  what that needs beside the answer, a JSON object; null for nothing
--   trace       varchar  worked chain of thought; null without one
--   scale       bigint   length of the chain a solver needs; 0 when unknown
--   position    bigint   order over all pools, by a second hash, so that families are mixed from the first row on
with clean as (
    select
        problems.*,
        sha256(concat_ws(' ', settings.seed, 'pool', problems.problem_id)) as draw,
        sha256(concat_ws(' ', settings.seed, 'order', problems.problem_id)) as turn
    from int_training_problems as problems
    cross join settings
    where problems.problem_id not in (select problem_id from int_contamination)
),

placed as (
    select
        *,
        (row_number() over (partition by family order by draw) - 0.5) / count(*) over (partition by family) as place
    from clean
),

final as (
    select
        pool_shares.pool,
        placed.problem_id,
        placed.question,
        placed.answer,
        placed.family,
        placed.source,
        placed.row_number,
        placed.row_id,
        placed.answer_type,
        placed.grading,
        placed.trace,
        placed.scale,
        row_number() over (order by placed.turn) as position
    from placed
    left join pool_shares
        on placed.place >= pool_shares.low
        and placed.place < pool_shares.high
        and (placed.trace is not null or not pool_shares.with_trace)
)

select * from final
